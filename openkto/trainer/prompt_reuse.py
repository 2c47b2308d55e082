"""Whether the policy's mismatched pairs go on after the prompts of its matched rows, and how many graphs it may hold.

The graphs of all micro-batches of a rank's share wait for z_ref then. One is always held: it takes at most its keys and
values more than in the other order, and the trial of `largest_micro_batch.py` holds them, too. Several are held where
they take no more than a part of the memory that is free when the run starts; what a token's graph takes is counted in a
forward of a few.

Units:   tokens, bytes.
"""

import logging
from dataclasses import replace
from typing import Any

import torch

from openkto.batches.loader import KTODataLoader
from openkto.distributed.free_memory import free_memory
from openkto.models.live_tensors import LiveTensors
from openkto.trainer.forwards import model_inputs, to_device
from openkto.trainer.largest_micro_batch import full_micro_batch, pending_state
from openkto.trainer.planning import reason_against_reuse
from openkto.trainer.protocols import TrainingStrategy
from openkto.trainer.run_state import RunState

log = logging.getLogger(__name__)

# Of the free memory, what graphs may take: a step needs the rest for its other forwards, gradients and fragments.
USABLE = 0.5
TRIAL_TOKENS = 64


def settle_reuse(
    run: RunState, loader: KTODataLoader, engine: Any, strategy: TrainingStrategy, *, is_new: bool
) -> None:
    """Let the loader lay out mismatched pairs after the matched rows' prompts where that can be done, and say so.

    All ranks must call it. A run that is resumed holds as many graphs as when it began: its bits stay the same.

    Args:
        loader: of the rows that train, which knows how the models run them (`plan_for`).
    """
    is_compiled = engine.module.compile_backend is not None or strategy.zero.deepcompile
    reason, held_tokens = reason_against_reuse(engine.module, strategy.zero_stage, is_compiled=is_compiled), None
    if loader.layout.shares_prompts and loader.needs_mismatched:
        if reason is not None:
            log.info("prompts: the policy's mismatched pairs run them again: %s", reason)
        elif is_new:
            held_tokens = _held_tokens(loader, engine, strategy)
            run.held_tokens = held_tokens
        else:
            held_tokens = run.held_tokens
    loader.layout = replace(loader.layout, held_tokens=held_tokens)
    if held_tokens is not None:
        choice = engine.module.share_prompts
        log.log(
            logging.INFO if choice == "on" else logging.DEBUG,
            "prompts: the policy's mismatched pairs go on after those of its matched rows, in steps of one micro-batch "
            "a rank or of up to %d tokens a rank (--share_prompts %s)",
            held_tokens,
            choice,
        )


def _held_tokens(loader: KTODataLoader, engine: Any, strategy: TrainingStrategy) -> int:
    """Return of how many tokens a rank can hold the graphs, the same on every rank.

    A power of two, so that the same run on the same machine finds the same number.
    """
    if loader.layout.measured_tokens is not None and strategy.device.type == "cuda":
        # The largest micro-batch was measured to fill what is free: beside it no other graph fits.
        return 0
    room = USABLE * (_free(strategy) - pending_state(engine.optimizer, strategy.device))
    own = room / _bytes_a_token(engine, strategy, min(TRIAL_TOKENS, loader.longest))
    least = int(-strategy.all_reduce([-own], op="max")[0])
    return 2 ** (least.bit_length() - 1) if least > 0 else 0


def _free(strategy: TrainingStrategy) -> float:
    """Return the bytes that this rank may still take; a processor's memory is divided among all ranks."""
    if strategy.device.type != "cuda":
        return free_memory() / strategy.world_size
    unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return float(torch.cuda.mem_get_info()[0] + unused)


def _bytes_a_token(engine: Any, strategy: TrainingStrategy, tokens: int) -> float:
    """Return what a forward of this many tokens leaves for its backward, by token."""
    inputs = model_inputs(to_device(full_micro_batch(1, tokens), strategy.device))
    live = LiveTensors([*engine.parameters(), *engine.buffers(), *inputs])
    engine.train()
    with live:
        output = engine(*inputs)
    kept = live.bytes
    del output
    return kept / tokens
