"""The forwards of a batch that training and evaluation share, and what they give.

Shapes:  B = rows in a micro-batch, L = rows on this rank, N = rows in the global batch (all ranks).
Units:   nats.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from openkto.data.loader import MicroBatch, RankBatch
from openkto.errors import TrainingError
from openkto.models.loss import KTOLoss, reference_point
from openkto.trainer.metrics import BatchRows
from openkto.trainer.throughput import StepCounts


class Strategy(Protocol):
    """What forwards ask of a strategy; `DeepspeedStrategy` is one, and a stand-in for tests is a few lines."""

    rank: int
    world_size: int
    device: torch.device

    def reference_forward(self, ref_model: Any) -> AbstractContextManager[None]: ...

    def all_reduce(self, values: list[float] | Tensor, op: Literal["sum", "max"] = "sum") -> Tensor: ...

    def gather_rows(self, values_LC: Tensor) -> NDArray[np.float64]: ...


class Reference(Protocol):
    """Where the reference's log-probabilities come from; see `openkto/trainer/reference.py`."""

    def log_probs(
        self, micro_batches: list[MicroBatch], between: Callable[[], None], *, with_tokens: bool = False
    ) -> list[Tensor]:
        """Return each micro-batch's log-probabilities, [B] float64, without gradient; called once a batch.

        With `with_tokens` those of its scored tokens, [K] float32: what keeps sums over rows alone cannot serve a loss
        that needs them.
        """
        ...


class BeforeGradient(NamedTuple):
    """What a batch's forwards without gradient give."""

    ref_log_prob: list[Tensor]  # of each matched micro-batch, [B] float64, or [K] float32 for a loss by token
    z_ref: Tensor  # scalar, float64: the loss's reference point, wherever it comes from
    mismatched_mean: float | None  # the same before the clamp; None where the loss needs no z_ref
    desirable_tokens: float  # the scored tokens of the whole batch's desirable rows
    counts: StepCounts


@torch.no_grad()
def forward_without_gradient(
    model: Any,
    reference: Reference,
    strategy: Strategy,
    loss: KTOLoss,
    batch: RankBatch,
    place: str,
    between: Callable[[], None],
    shift: float = 0.0,
) -> BeforeGradient:
    """Run the policy on the mismatched pairs and the reference on everything, then agree on z_ref.

    All of it comes before the first backward: z_ref is exact for every micro-batch, and ZeRO-3 keeps its prefetch
    order. The policy is left in evaluation mode: an adapter's dropout belongs to the forwards that train.

    Args:
        place: names the batch in an error.
        between: called before each forward, as often on every rank.
        shift: nats: the reference point of a loss without z_ref.

    Raises:
        TrainingError: a log-ratio of a mismatched pair is not finite.
    """
    device, mismatched = strategy.device, [strip_prefix(m) for m in batch.mismatched]
    model.eval()
    policy = forward_all(model, mismatched, device, between, with_tokens=loss.by_token)
    ref_log_prob = reference.log_probs([*mismatched, *batch.matched], between, with_tokens=loss.by_token)
    ref_mismatched, ref_matched = ref_log_prob[: len(mismatched)], ref_log_prob[len(mismatched) :]
    log_ratio_L = torch.zeros(0, dtype=torch.float64)
    row_L = torch.zeros(0, dtype=torch.int64)
    if mismatched:
        is_real_L = torch.cat([is_real(m) for m in mismatched])
        triples = zip(policy, ref_mismatched, mismatched, strict=True)
        ratios = [loss.log_ratios(p, r, m["loss_mask"].to(device)) for p, r, m in triples]
        log_ratio_L = torch.cat(ratios).cpu()[is_real_L]
        row_L = torch.cat([m["row"] for m in mismatched])[is_real_L]
    totals = strategy.all_reduce(
        [
            float(log_ratio_L.sum()),
            sum(float(is_real(m).sum()) for m in batch.matched),
            sum(_real_tokens(m) for m in batch.matched),
            sum(_real_tokens(m) for m in mismatched),
            float(sum(m["input_ids"].numel() for m in [*batch.matched, *mismatched])),
            float(batch.same_completion),
            sum(float(m["loss_mask"][m["label"]].sum()) for m in batch.matched),
        ]
    )
    rows, matched_tokens, mismatched_tokens, slots, same_completion = (int(t) for t in totals[1:6])
    desirable_tokens = float(totals[6])
    counts = StepCounts(rows, matched_tokens, mismatched_tokens, slots, batch.same_prompt, same_completion)
    if not loss.needs_z_ref:
        return BeforeGradient(ref_matched, totals.new_tensor(shift), None, desirable_tokens, counts)
    if not bool(totals[0].isfinite()):
        pairs_NC = strategy.gather_rows(torch.stack([row_L.double(), log_ratio_L], dim=1).to(device))
        stop_unless_finite(f"{place}, mismatched pairs", pairs_NC[:, 0], pairs_NC[:, 1])
    z_ref, mismatched_mean = reference_point(totals[0], totals[1]), float(totals[0] / totals[1])
    return BeforeGradient(ref_matched, z_ref, mismatched_mean, desirable_tokens, counts)


def forward(model: Any, micro_batch: MicroBatch, device: torch.device, *, with_tokens: bool = False) -> Tensor:
    """Return the micro-batch's log-probabilities, [B] float64, or those of its scored tokens, [K] float32."""
    on_device = to_device(micro_batch, device)
    inputs = on_device["input_ids"], on_device["attention_mask"], on_device["loss_mask"]
    return model(*inputs, with_tokens=True).log_prob_K if with_tokens else model(*inputs).log_prob_B


def forward_all(
    model: Any,
    micro_batches: list[MicroBatch],
    device: torch.device,
    between: Callable[[], None],
    *,
    with_tokens: bool = False,
) -> list[Tensor]:
    """Return `forward` of each micro-batch, with a call of `between` before each."""
    log_probs = []
    for micro_batch in micro_batches:
        between()
        log_probs.append(forward(model, micro_batch, device, with_tokens=with_tokens))
    return log_probs


def to_device(micro_batch: MicroBatch, device: torch.device) -> MicroBatch:
    """Return the micro-batch on the device."""
    return {name: tensor.to(device, non_blocking=True) for name, tensor in micro_batch.items()}


def strip_prefix(micro_batch: MicroBatch) -> MicroBatch:
    """Return a mismatched micro-batch under the names of a matched one."""
    return {name.removeprefix("kl_"): tensor for name, tensor in micro_batch.items()}


def is_real(micro_batch: MicroBatch) -> Tensor:
    """Return which rows are the data's, [B] bool: a dummy that keeps ranks in step scores no token."""
    return micro_batch["loss_mask"].any(dim=1)


def _real_tokens(micro_batch: MicroBatch) -> float:
    return float((micro_batch["attention_mask"] * is_real(micro_batch)[:, None]).sum())


def row_columns(micro_batch: MicroBatch, log_prob_B: Tensor, log_ratio_B: Tensor, *more: Tensor) -> Tensor:
    """Return a line for each real row, [rows, C] float64: what `batch_rows` reads, then `more`."""
    known = (micro_batch["label"], micro_batch["weight"], micro_batch["loss_mask"].sum(1))
    columns = (micro_batch["row"], log_prob_B, log_ratio_B, *known, *more)
    return torch.stack([c.detach().double() for c in columns], dim=1)[is_real(micro_batch)]


def batch_rows(rows_NC: NDArray[np.float64], before: BeforeGradient) -> BatchRows:
    """Return the batch's rows from the columns that `row_columns` made."""
    return BatchRows(
        log_prob_N=rows_NC[:, 1],
        log_ratio_N=rows_NC[:, 2],
        is_desirable_N=rows_NC[:, 3] > 0.5,
        weight_N=rows_NC[:, 4],
        scored_N=rows_NC[:, 5],
        z_ref=float(before.z_ref),
        mismatched_mean=before.mismatched_mean,
    )


def stop_unless_finite(place: str, row_N: NDArray[np.float64], value_N: NDArray[np.float64]) -> None:
    """Raise on every rank alike where a log-ratio is not finite.

    Raises:
        TrainingError: naming the rows.
    """
    bad_N = ~np.isfinite(value_N)
    if bad_N.any():
        raise TrainingError(
            f"{place}: every log-probability must be finite; got {value_N[bad_N][0]}, and no update was made. "
            f"{name_rows(row_N[bad_N])}"
        )


def name_rows(row_N: NDArray[np.float64]) -> str:
    """Say which rows to look at, ten at the most."""
    numbers = sorted({int(r) for r in row_N})
    named = ", ".join(str(n) for n in numbers[:10]) + (f" and {len(numbers) - 10} more" if len(numbers) > 10 else "")
    return f"Look at row{'s' if len(numbers) > 1 else ''} {named} (counted from 0), or lower --learning_rate."
