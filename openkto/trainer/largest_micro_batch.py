"""How many tokens a micro-batch may have: measured on this GPU with this model, before training (`auto`).

Memory rises in a straight line with the tokens of a micro-batch of whole rows, so two sizes tell the line. Nothing
here changes what training computes: the gradient of the trial is 0, which the first step adds to its own.

Shapes:  B = rows in the trial, T = the longest sequence that the data can make.
Units:   tokens, bytes.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch

from openkto.batches.loader import WITHOUT_GRADIENT
from openkto.batches.micro_batch import MicroBatch, collate
from openkto.models.kept_keys import KeptKeys
from openkto.trainer.forwards import forward, model_inputs, to_device
from openkto.trainer.planning import reason_against_reuse, reason_against_sharing

log = logging.getLogger(__name__)

# What a CPU takes, whose memory is not measured: it is not the process's own.
CPU_TOKENS = 8192
USABLE = 0.9  # of what is free; the rest is for fragments, other libraries and what a trial does not see
MOST_TOKENS = 2**20


def settle_tokens(
    engine: Any, strategy: Any, longest: int, between: Callable[[], None], *, with_gradient: bool = True
) -> int:
    """Return the tokens of a micro-batch with gradient that fit, the same on every rank; all ranks must call it.

    Args:
        engine: the model to try, prepared.
        longest: T, tokens.
        between: called before each trial, as often on every rank.
        with_gradient: whether the model trains; else only what forwards take is measured.

    Raises:
        torch.OutOfMemoryError: not even one sequence of that length fits.
    """
    if strategy.device.type != "cuda":
        return max(CPU_TOKENS, longest)

    def measure(rows: int) -> int:
        between()
        torch.cuda.reset_peak_memory_stats()
        try_micro_batch(engine, strategy, rows, longest, with_gradient=with_gradient)
        own = torch.cuda.max_memory_allocated()
        if with_gradient:
            own += pending_state(engine.optimizer, strategy.device)
        return int(strategy.all_reduce([float(own)], op="max")[0])

    free, _ = torch.cuda.mem_get_info()
    room = USABLE * (free + torch.cuda.memory_reserved())
    room = -float(strategy.all_reduce([-room], op="max")[0])
    tokens = longest * most_rows(measure, room, MOST_TOKENS // longest)
    torch.cuda.reset_peak_memory_stats()  # the run's own peak is what metrics report
    log.info("a micro-batch takes up to %d tokens (--max_tokens_per_micro_batch auto)", tokens)
    return tokens


def most_rows(measure: Callable[[int], int], room: float, most: int) -> int:
    """Return how many rows fit into `room` bytes, at least one.

    Args:
        measure: the peak bytes of this many rows.
        most: rows to return at most.
    """
    one = measure(1)
    if 2 * one > room + measure(0):
        return 1
    a_row = max(measure(2) - one, 1)
    return max(1, min(int(1 + (room - one) // a_row), most))


def try_micro_batch(engine: Any, strategy: Any, rows: int, longest: int, *, with_gradient: bool) -> None:
    """Run what a step runs of a micro-batch: the larger forward without gradient, then one with, and its backward."""
    if rows == 0:
        return
    engine.eval()
    with torch.no_grad():
        forward(engine, full_micro_batch(WITHOUT_GRADIENT[strategy.device.type] * rows, longest), strategy.device)
    if with_gradient:
        engine.train()
        micro_batch = full_micro_batch(rows, longest)
        inputs = model_inputs(to_device(micro_batch, strategy.device))
        if _may_reuse_prompts(engine.module, strategy):
            # The mismatched pairs run while the graph waits, on keys and values that it would not keep by itself.
            kept = KeptKeys()
            output = engine(*inputs, kept_keys=kept)
            with torch.no_grad():
                forward(engine, micro_batch, strategy.device)
            kept.drop()
        else:
            output = engine(*inputs)
        strategy.backward(engine, 0.0 * output.log_prob_B.float().sum(), is_last=False)


def _may_reuse_prompts(actor: Any, strategy: Any) -> bool:
    """Return whether a step may run mismatched pairs after the prompts of its matched rows."""
    if actor.share_prompts == "off" or reason_against_sharing(actor) is not None:
        return False
    is_compiled = actor.compile_backend is not None or strategy.zero.deepcompile
    return reason_against_reuse(actor, strategy.zero_stage, is_compiled=is_compiled) is None


def full_micro_batch(rows: int, longest: int) -> MicroBatch:
    """Return a micro-batch of rows that are as long as can be, of whose tokens all but the first are scored."""
    row = {"label": True, "weight": 1.0, "row": 0}
    return collate([([0], [0] * (longest - 1), [True] * (longest - 1))] * rows, [row] * rows, 0)


def pending_state(optimizer: Any, device: torch.device) -> int:
    """Return the bytes on the device that an optimizer's first step will still take: two moments and a gradient.

    Args:
        optimizer: an engine's: torch's own, or DeepSpeed's around it.
    """
    inner = optimizer if isinstance(optimizer, torch.optim.Optimizer) else optimizer.optimizer
    if inner.state:
        return 0
    parameters = [parameter for group in inner.param_groups for parameter in group["params"]]
    return sum(3 * p.numel() * p.element_size() for p in parameters if p.device.type == device.type)
