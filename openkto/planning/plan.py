"""A plan: what a run takes on a machine, by settings, and the settings to take, as text and as JSON."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from openkto.planning.activations import RECOMPUTATION, Shape
from openkto.planning.machine import GIB, Machine
from openkto.planning.memory import PARTS, Sizes
from openkto.planning.ways import Choice, Trains, nearest
from openkto.planning.work import Step


@dataclass(frozen=True)
class Plan:
    """What is known before a run.

    Args:
        shapes, sizes, steps: by what trains; of the shapes the first is with gradient.
        num_steps: of the run, or None where no rows are given.
        found: all choices at the size of micro-batch that was settled on.
        choice: the one to take, or None where nothing fits.
        command: that starts it.
    """

    name: str
    machine: Machine
    precision: str
    rows: str
    shapes: Mapping[Trains, tuple[Shape, Shape]]
    sizes: Mapping[Trains, Sizes]
    steps: Mapping[Trains, Step]
    num_steps: int | None
    steps_per_epoch: int
    found: list[Choice]
    choice: Choice | None
    command: str

    def flops(self, choice: Choice) -> float:
        """Return what all ranks compute in a step."""
        is_cached, is_recomputed = choice.way.reference == "cached", choice.way.recomputation == "whole"
        return self.steps[choice.trains].flops(is_recomputed=is_recomputed, is_cached=is_cached)

    def seconds(self, choice: Choice) -> float | None:
        """Return the seconds of a step, without what the ranks send to each other."""
        if self.machine.rate is None:
            return None
        return self.flops(choice) * self.steps[choice.trains].waiting / (self.machine.rate * self.machine.ranks)

    def hours(self, choice: Choice) -> float | None:
        """Return the hours of all steps, and of filling a cache: its mismatched pairs are others in each epoch."""
        step, rate, seconds = self.steps[choice.trains], self.machine.rate, self.seconds(choice)
        if rate is None or seconds is None or self.num_steps is None:
            return None
        filling = 0.0
        if choice.way.reference == "cached":
            first = min(self.num_steps, self.steps_per_epoch)
            filling = first * step.filling + (self.num_steps - first) * step.filling_later
        return (seconds * self.num_steps + filling / (rate * self.machine.ranks)) / 3600

    def nearest_in_words(self) -> str:
        """Say which choice comes nearest to fitting."""
        if not self.found:
            return "The given flags leave no choice that training would take."
        one = nearest(self.found)
        return f"The nearest is {in_words(one)}, which takes {one.memory.most / GIB:.1f} GiB."


def in_words(choice: Choice) -> str:
    """Name a choice's settings."""
    way, options = choice.way, choice.way.options
    words = ["all parameters" if choice.trains == "full" else "LoRA", f"ZeRO {way.zero_stage}"]
    words += [f"gradient checkpointing ({way.recomputation})"] if way.recomputation != "none" else []
    words += ["optimizer offload"] * options.adam_offload + ["parameter offload"] * options.param_offload
    return ", ".join([*words, f"reference: {way.reference}"])


def as_text(plan: Plan) -> str:
    """Return what fits a terminal."""
    machine = plan.machine
    kind = "CPU" if machine.device == "cpu" else "GPU" if machine.ranks == 1 else "GPUs"
    lines = [f"model: {plan.name}"]
    for trains, sizes in plan.sizes.items():
        lines.append(f"  {trains}: {_count(sizes.num_trained)} of {_count(sizes.numel)} parameters train")
    lines += [f"machine: {machine.ranks} {kind}, {machine.room / GIB:.1f} GiB for each rank, {plan.precision}"]
    lines += [f"rows: {plan.rows}"]
    shape = next(iter(plan.shapes.values()))[0]
    lines += [f"the largest micro-batch with gradient: {shape.rows * shape.length} tokens, {shape.scored} scored", ""]
    lines += [*_table(plan), ""]
    if plan.choice is not None:
        lines += [*_chosen(plan, plan.choice), "", plan.command]
    return "\n".join(lines)


def _table(plan: Plan) -> list[str]:
    head = f"{'trains':7}{'ZeRO':>5}  {'reference':10}{'offload':22}" + "".join(f"{how:>11}" for how in RECOMPUTATION)
    lines = ["GiB of a rank at its highest moment, by gradient checkpointing; * fits, > is recommended", head]
    rows: dict[tuple[Any, ...], dict[str, Choice]] = {}
    for one in plan.found:
        options = one.way.options
        offload = "optimizer, parameters" if options.param_offload else "optimizer" if options.adam_offload else "-"
        key = (one.trains, one.way.zero_stage, one.way.reference, offload)
        rows.setdefault(key, {})[one.way.recomputation] = one
    for (trains, stage, reference, offload), by_how in rows.items():
        cells = "".join(f"{_cell(plan, by_how.get(how)):>11}" for how in RECOMPUTATION)
        lines.append(f"{trains:7}{stage:>5}  {reference:10}{offload:22}{cells}")
    return lines


def _cell(plan: Plan, one: Choice | None) -> str:
    if one is None:
        return ""
    sign = ">" if one is plan.choice else "*" if one.memory.most <= plan.machine.room else " "
    return f"{sign}{one.memory.total / GIB:8.2f}"


def _chosen(plan: Plan, choice: Choice) -> list[str]:
    memory, step = choice.memory, plan.steps[choice.trains]
    lines = [
        f"recommended: {in_words(choice)}",
        f"memory: {memory.total / GIB:.2f} GiB, highest in the {memory.moment}"
        + (f", and up to {memory.most / GIB:.2f} GiB with holes in the heap" if memory.most > memory.total else ""),
    ]
    lines += [f"  {name:12}{memory.parts[name] / GIB:8.2f} GiB" for name in PARTS if memory.parts[name] > 0]
    if memory.offloaded:
        lines.append(f"  CPU memory for offload: {memory.offloaded / GIB:.1f} GiB for each rank of a node")
    lines.append(f"a step: {step.rows:.0f} rows, {step.tokens:.0f} tokens, {plan.flops(choice) / 1e12:.3g} TFLOP")
    seconds, hours, rate = plan.seconds(choice), plan.hours(choice), plan.machine.rate
    if seconds is None or rate is None:
        return [*lines, "time: give --tflops, what one GPU computes in a second in such a run, to see it"]
    lines.append(
        f"time: {seconds:.3g} s a step at {rate / 1e12:.3g} TFLOP/s a rank ({plan.machine.rate_is}), without "
        "what ranks send to each other"
    )
    if hours is None or plan.num_steps is None:
        return [*lines, "the run: give --dataset to see its steps and hours"]
    steps = "1 step" if plan.num_steps == 1 else f"{plan.num_steps} steps"
    return [*lines, f"the run: {steps}, {_duration(3600 * hours)}, without evaluations"]


def _duration(seconds: float) -> str:
    for unit, name in ((3600, "hours"), (60, "minutes")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds:.2g} seconds"


def _count(number: int) -> str:
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= unit:
            return f"{number / unit:.2f} {name}"
    return str(number)


def as_json(plan: Plan) -> dict[str, Any]:
    """Return the same as one object; bytes, seconds and FLOPs."""
    return {
        "model": plan.name,
        "parameters": {t: {"total": s.numel, "trained": s.num_trained} for t, s in plan.sizes.items()},
        "machine": vars(plan.machine),
        "precision": plan.precision,
        "rows": plan.rows,
        "largest_micro_batch": {t: vars(shapes[0]) for t, shapes in plan.shapes.items()},
        "steps": plan.num_steps,
        "step": {trains: vars(step) for trains, step in plan.steps.items()},
        "choices": [_choice_as_json(plan, one) for one in plan.found],
        "recommended": None if plan.choice is None else _choice_as_json(plan, plan.choice),
        "command": plan.command or None,
    }


def _choice_as_json(plan: Plan, one: Choice) -> dict[str, Any]:
    way = one.way
    return {
        "trains": one.trains,
        "zero_stage": way.zero_stage,
        "gradient_checkpointing": way.recomputation,
        "reference": way.reference,
        "adam_offload": way.options.adam_offload,
        "param_offload": way.options.param_offload,
        "fits": one.memory.most <= plan.machine.room,
        "bytes": one.memory.total,
        "bytes_at_most": one.memory.most,
        "parts": one.memory.parts,
        "moment": one.memory.moment,
        "offloaded_bytes": one.memory.offloaded,
        "flops_a_step": plan.flops(one),
        "seconds_a_step": plan.seconds(one),
        "hours": plan.hours(one),
    }
