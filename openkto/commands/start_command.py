"""The command that starts a planned run: the words that the plan was asked for with, and the flags that it chose."""

import shlex

from openkto.config import RunConfig, trains_adapter
from openkto.config.flags import PLAN_ONLY
from openkto.config.run_options import RunOptions
from openkto.masking import masked_value
from openkto.planning.machine import Machine
from openkto.planning.ways import Choice

LORA_RANK = 16  # of the adapter that is looked at where no rank is given
GPUS_OF_A_NODE = 8
CHECKPOINTING = {"none": "false", "selective": "selective", "whole": "true"}


def start_command(
    argv: list[str], config: RunConfig, options: RunOptions, machine: Machine, choice: Choice, limit: int | None
) -> str:
    """Return what starts the run; an address in it comes without its key.

    Args:
        argv: the words of `openkto plan`.
        limit: the rows of a micro-batch that were settled on, or None for the default.
    """
    way, given = choice.way, options.given
    chosen = {
        "dataset": None if config.data.dataset else "ROWS",
        "lora_rank": LORA_RANK if choice.trains == "LoRA" and not trains_adapter(config) else None,
        "zero_stage": way.zero_stage,
        "gradient_checkpointing": None if way.recomputation == "none" else CHECKPOINTING[way.recomputation],
        "ref_mode": way.reference if way.reference in ("cached", "model") else None,
        "adam_offload": "true" if way.options.adam_offload else None,
        "param_offload": "true" if way.options.param_offload else None,
        "micro_train_batch_size": limit,
    }
    words = _launcher(machine) + _without_plan(argv)
    for name, value in chosen.items():
        if value is not None and name not in given:
            words += [f"--{name}", str(value)]
    return shlex.join(map(masked_value, words))


def _launcher(machine: Machine) -> list[str]:
    if machine.ranks == 1:
        return ["openkto", "train"]
    nodes = -(-machine.ranks // GPUS_OF_A_NODE)
    launcher = ["deepspeed"] + (["--num_nodes", str(nodes)] if nodes > 1 else [])
    return [*launcher, "--num_gpus", str(min(machine.ranks, GPUS_OF_A_NODE)), "--module", "openkto", "train"]


def _without_plan(argv: list[str]) -> list[str]:
    """Return the words that `openkto train` takes too."""
    own, kept, is_left_out = PLAN_ONLY | {"json"}, [], False
    for word in argv:
        if word.startswith("--"):
            is_left_out = word[2:].partition("=")[0] in own
        if not is_left_out:
            kept.append(word)
    return kept
