"""`openkto plan`, `cli/plan.py`: what a run will take before it starts, and which settings fit.

The flags that are given stay; the others are searched. Of the model only its configuration is read, of the rows their
lengths.
"""

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from openkto.config import (
    LoraConfig,
    RunConfig,
    is_adapter_folder,
    may_be_cached,
    policy_name,
    ref_is_adapter,
    reference_name,
    settings_for,
    trains_adapter,
)
from openkto.config.flags import parse
from openkto.config.run_options import RunOptions
from openkto.errors import ConfigError

if TYPE_CHECKING:
    from openkto.batches.loader import KTODataLoader
    from openkto.data.dataset import UnpairedPreferenceDataset
    from openkto.models import Actor
    from openkto.planning.activations import Shape
    from openkto.planning.machine import Machine
    from openkto.planning.memory import Reference, Sizes, Way
    from openkto.planning.plan import Plan
    from openkto.planning.ways import Trains
    from openkto.report.flops import ForwardWork

log = logging.getLogger(__name__)

SMALLER = (4, 2, 1)  # rows in a micro-batch that are tried where the default's do not fit


def main(argv: list[str]) -> None:
    """Print the plan of the training run of the command line.

    Raises:
        OpenKTOError: something that the user can act on; nothing fits.
    """
    config, options = parse(argv, "plan")
    for line in options.warnings:
        log.warning("warning: %s", line)
    plan = make_plan(config, options, argv)
    from openkto.planning.plan import as_json, as_text

    print(json.dumps(as_json(plan), indent=2) if options.json else as_text(plan))
    if plan.choice is None:
        raise ConfigError(
            f"openkto plan: the run must fit into {plan.machine.ranks} x {plan.machine.room / 2**30:.1f} GiB; got "
            f"settings of which none does. {plan.nearest_in_words()} Take more or larger GPUs, a smaller model or "
            "--max_len, or leave flags out that are given."
        )


def make_plan(config: RunConfig, options: RunOptions, argv: list[str]) -> "Plan":
    """Return the plan of a run.

    Args:
        argv: the command line, whose words the recommended command repeats.

    Raises:
        ConfigError, DataError: the model, the rows or the machine are not as they must be.
    """
    # Only now what takes seconds to import, so that a wrong flag is answered at once.
    from openkto.commands.start_command import start_command
    from openkto.distributed.zero_options import ZeroOptions
    from openkto.planning.machine import find_machine
    from openkto.planning.memory import Way
    from openkto.planning.plan import Plan
    from openkto.planning.ways import best, choices
    from openkto.planning.work import dealt_batches, largest_shapes, mean_step
    from openkto.trainer.schedule import total_steps

    machine = find_machine(options.gpus, options.gpu_memory, options.tflops)
    _check(config, machine)
    precision = config.model.param_dtype or ("bf16" if machine.device == "cuda" else "fp32")
    actors = _policies(config, options, precision)
    rows, rows_are = _rows(config)
    other = _other_reference(config)
    _check_runs(config, next(iter(actors.values())), machine)
    base = Way(
        zero_stage=0,
        ranks=machine.ranks,
        precision=precision,
        device=machine.device,
        grad_accum_dtype=config.deepspeed.grad_accum_dtype or "fp32",
        options=ZeroOptions(**settings_for(ZeroOptions, config.deepspeed)),
    )
    references = {trains: _references(config, trains) for trains in actors}
    for limit in _limits(config, options):
        loaders = {trains: _loader(config, base, rows, limit, actor, other) for trains, actor in actors.items()}
        batches = {trains: dealt_batches(loader) for trains, loader in loaders.items()}
        shapes = {trains: largest_shapes(loader, batches[trains]) for trains, loader in loaders.items()}
        sizes = {trains: _sizes(config, machine, actor, shapes[trains], other) for trains, actor in actors.items()}
        found = choices(sizes, base, references, lambda way: _allows(config, options, way))
        choice = best(found, machine.room)
        if choice is not None:
            break
    for trains, loader in loaders.items():
        if choice is not None and _reuses_prompts(config, actors[trains], loader, choice.way):
            # In steps of one micro-batch a rank; in others the run looks at the memory that is free.
            loader.layout = replace(loader.layout, held_tokens=0)
            batches[trains] = dealt_batches(loader)
    steps = {
        trains: mean_step(loader, batches[trains], *_works(actors[trains], other)) for trains, loader in loaders.items()
    }
    per_epoch = len(next(iter(loaders.values())))
    num_steps = total_steps(per_epoch, config.train.max_epochs, config.train.max_steps)
    return Plan(
        name=policy_name(config.model),
        machine=machine,
        precision=precision,
        rows=rows_are,
        shapes=shapes,
        sizes=sizes,
        steps=steps,
        num_steps=num_steps if config.data.dataset or config.train.max_steps else None,
        steps_per_epoch=per_epoch,
        found=found,
        choice=choice,
        command="" if choice is None else start_command(argv, config, options, machine, choice, limit),
    )


def _check(config: RunConfig, machine: "Machine") -> None:
    """Refuse what the model of memory does not know."""
    for name in ("adam_offload", "param_offload", "ref_offload"):
        if machine.device == "cpu" and vars(config.deepspeed)[name]:
            raise ConfigError(
                f"--{name}: moves memory from a GPU; got it for a plan on this CPU. Leave it out, or pass --gpus and "
                "--gpu_memory."
            )
    for name in ("tensor_parallel_size", "sequence_parallel_size"):
        size = vars(config.deepspeed)[name]
        if size > 1:
            raise ConfigError(f"--{name}: must be 1 for a plan, which does not know it yet; got {size}. Leave it out.")
    if config.deepspeed.ds_config is not None:
        log.warning("warning: --ds_config: the plan does not read the file.")
    if config.model.use_liger_kernel or config.model.torch_compile:
        log.warning("warning: the plan is for the model's own layers; compiled or fused ones take less memory.")


def _check_runs(config: RunConfig, actor: "Actor", machine: "Machine") -> None:
    """Refuse a model whose code looks at values, which the meta device does not have, or wants another dtype there.

    Raises:
        ConfigError: it cannot be counted.
    """
    from openkto.planning.activations import Shape, count_training

    try:
        count_training(actor, Shape(1, 8, 4), "none", machine.device)
    except Exception as error:  # other people's code: it raises whatever it does
        reason = " ".join(str(error).split())[:120]
        raise ConfigError(
            f"--pretrain: the model must run on torch's meta device, where memory is counted; got "
            f"{policy_name(config.model)} ({actor.model.config.model_type}: {reason}). For a mixture of experts pass "
            "--param_dtype bf16; else look at the peak that a short run reports."
        ) from error


def _policies(config: RunConfig, options: RunOptions, precision: str) -> "dict[Trains, Actor]":
    """Return the policies that the given flags leave open, on the meta device."""
    from openkto.commands.start_command import LORA_RANK
    from openkto.models.empty import empty_actor
    from openkto.models.loading import DTYPES

    wanted: dict[Trains, LoraConfig] = {}
    if trains_adapter(config):
        wanted["LoRA"] = config.lora
    else:
        wanted["full"] = config.lora
        if "lora_rank" not in options.given:
            wanted["LoRA"] = replace(config.lora, lora_rank=LORA_RANK)
    settings: dict[str, Any] = {"dtype": DTYPES[precision], **_kernels(config)}
    name, trusts = policy_name(config.model), config.model.trust_remote_code
    return {trains: empty_actor(name, lora, trusts, **settings) for trains, lora in wanted.items()}


def _kernels(config: RunConfig) -> dict[str, Any]:
    names = ("packing", "attn_implementation", "share_prompts")
    return {name: vars(config.model)[name] for name in names}


def _other_reference(config: RunConfig) -> "Actor | None":
    """Return the reference's model where that is not the policy's."""
    from openkto.models.empty import empty_actor

    name = reference_name(config.model)
    if name == policy_name(config.model) and not is_adapter_folder(name):
        return None
    return empty_actor(name, LoraConfig(), config.model.trust_remote_code, **_kernels(config))


def _sizes(
    config: RunConfig, machine: "Machine", actor: "Actor", shapes: "tuple[Shape, Shape]", other: "Actor | None"
) -> "Sizes":
    """Return the sizes of a policy and its reference, which without another model is the policy's own, no adapter."""
    from openkto.planning.ways import count_sizes

    whole = actor if other is None else other
    frozen_only = other is None and actor.has_adapter
    reference = sum(p.numel() for p in whole.parameters() if not (frozen_only and p.requires_grad))
    return count_sizes(actor, shapes, machine.device, reference=reference, in_4_bits=config.lora.load_in_4bit)


def _works(actor: "Actor", other: "Actor | None") -> "tuple[ForwardWork, ForwardWork]":
    """Return the work of a policy's forward and of its reference's."""
    from openkto.report.flops import forward_work

    reference = forward_work(actor, adapter_off=actor.has_adapter) if other is None else forward_work(other)
    return forward_work(actor), reference


def _reuses_prompts(config: RunConfig, actor: "Actor", loader: "KTODataLoader", way: "Way") -> bool:
    """Return whether the policy's mismatched pairs may go on after the prompts of its matched rows."""
    from openkto.trainer.planning import reason_against_reuse

    is_compiled = config.model.torch_compile or config.deepspeed.deepcompile
    is_free = reason_against_reuse(actor, way.zero_stage, is_compiled=is_compiled) is None
    return loader.layout.shares_prompts and is_free


def _references(config: RunConfig, trains: "Trains") -> "tuple[Reference, ...]":
    has_adapter = trains == "LoRA"
    if ref_is_adapter(config.model, has_adapter=has_adapter):
        return ("adapter",)
    if config.model.ref_mode == "model" or not may_be_cached(config, has_adapter=has_adapter):
        return ("model",)
    return ("cached",) if config.model.ref_mode == "cached" else ("cached", "model")


def _allows(config: RunConfig, options: RunOptions, way: "Way") -> bool:
    """Return whether a way is what the given flags say, as far as they say it."""
    from openkto.commands.start_command import CHECKPOINTING
    from openkto.planning.ways import RARE, layout_of

    own, given = config.deepspeed, options.given
    is_asked_for = layout_of(way) == (own.zero_stage, own.adam_offload, own.param_offload)
    if layout_of(way) in RARE and not is_asked_for:
        return False
    asked = {
        "zero_stage": (own.zero_stage, way.zero_stage),
        "adam_offload": (own.adam_offload, way.options.adam_offload),
        "param_offload": (own.param_offload, way.options.param_offload),
        "gradient_checkpointing": (
            str(config.model.gradient_checkpointing).lower(),
            CHECKPOINTING[way.recomputation],
        ),
    }
    if any(name in given and wanted != has for name, (wanted, has) in asked.items()):
        return False
    if own.zpg > 1 and way.zero_stage < 3:
        return False
    if way.precision == "fp16" and way.zero_stage == 0:
        return False
    if config.lora.load_in_4bit and way.zero_stage == 3:
        return False
    return not (config.model.torch_compile and way.recomputation == "selective")


def _rows(config: RunConfig) -> tuple[Any, str]:
    """Return the rows to train on, or assumed ones, and what they are in words."""
    from openkto.planning.work import EqualRows

    longest = config.data.max_len
    if not config.data.dataset:
        rows = EqualRows(config.train.train_batch_size, longest)
        return rows, f"none are given: each is assumed to have --max_len {longest} tokens, half of them scored"
    found = _checked_rows(config)
    lengths = found.cut_lengths(found.prompt_lengths, found.completion_lengths)
    return found, f"{len(found)}, {lengths.mean():.0f} tokens in the mean, {lengths.max()} at most, --max_len {longest}"


def _checked_rows(config: RunConfig) -> "UnpairedPreferenceDataset":
    """Return the rows to train on; say of them and of those to evaluate on what the run would warn of or refuse."""
    from openkto.commands.build import check_models, model_names
    from openkto.commands.check import check_evaluation, checked_rows
    from openkto.commands.outlook import warn_of_outlook

    models = model_names(config)
    tokenizer = check_models(config, models)
    rows = checked_rows(config, models, tokenizer, warn_of_outlook)
    check_evaluation(config, models, tokenizer, rows)
    return rows


def _limits(config: RunConfig, options: RunOptions) -> Iterator[int | None]:
    """Yield the rows of a micro-batch to try: as the flags say, then fewer where they leave it open."""
    yield config.train.micro_train_batch_size
    if not options.given & {"micro_train_batch_size", "max_tokens_per_micro_batch"}:
        yield from SMALLER


def _loader(
    config: RunConfig, base: "Way", rows: Any, limit: int | None, actor: "Actor", other: "Actor | None"
) -> "KTODataLoader":
    """Return the run's loader, told of the models as in a training whose reference runs in each step."""
    from openkto.batches.loader import WITHOUT_GRADIENT, KTODataLoader
    from openkto.trainer.planning import plan_for

    tokens = config.train.max_tokens_per_micro_batch
    loader = KTODataLoader(
        rows,
        config.train.train_batch_size,
        # What is measured on a GPU fits by itself, if one row does.
        1 if tokens == "auto" else limit,
        world_size=base.ranks,
        seed=config.train.seed,
        max_tokens_per_micro_batch=tokens if isinstance(tokens, int) else None,
        needs_mismatched=config.loss.facts.needs_z_ref,
        larger_without_gradient=WITHOUT_GRADIENT[base.device],
    )
    others = [] if other is None else [other]
    plan_for(
        [loader],
        actor,
        *others,
        reference_runs=True,
        by_token=config.loss.facts.by_token,
        with_balancing_loss=config.loss.aux_loss_coef > 0,
        precision=base.precision,
    )
    return loader
