"""What a batch's rows give: their parts of its loss, and their numbers, gathered from all ranks.

Shapes:  B = rows in a micro-batch, L = rows on this rank, N = rows in the global batch (all ranks).
Units:   nats.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from openkto.batches.loader import RankBatch
from openkto.batches.micro_batch import MicroBatch
from openkto.errors import TrainingError
from openkto.models.actor import ActorOutput
from openkto.models.loss import KTOLoss, sft_loss
from openkto.report.metrics import BatchRows
from openkto.trainer.forwards import BeforeBackward, is_real
from openkto.trainer.protocols import Strategy

Columns = dict[str, Tensor]  # what is known of a micro-batch's rows, by name, [B] float64 each


class MatchedPart(NamedTuple):
    """What the matched forward of a micro-batch gives."""

    loss: Tensor  # scalar, float32, with the graph: its part of the global batch's loss
    aux_loss: Tensor  # scalar, without: its part of the balancing loss; 0 where there is none
    columns: Columns


def part_of_loss(
    loss: KTOLoss,
    batch: RankBatch,
    micro_batch: MicroBatch,
    output: ActorOutput,
    ref_log_prob: Tensor,
    before: BeforeBackward,
) -> MatchedPart:
    """Return a matched micro-batch's part of the batch's loss.

    Args:
        micro_batch: one of `batch.matched`, on the device.
        output: what `forward_with_gradient` gave for it.
        ref_log_prob: its part of `before.ref_log_prob`.
    """
    label_B, mask_BT = micro_batch["label"], micro_batch["loss_mask"]
    log_prob = output.log_prob_K if loss.facts.by_token else output.log_prob_B
    log_ratio_B = loss.log_ratios(log_prob, ref_log_prob, mask_BT)
    log_prob_B = loss.row_log_probs(log_prob, mask_BT)
    losses_B = loss(log_ratio_B, label_B, before.z_ref, micro_batch["weight"])
    # A dummy row's log-ratio is the constant 0: it has no gradient, and its loss is not reported.
    total, aux_loss = losses_B.sum() / len(batch.rows), torch.zeros((), device=losses_B.device)
    if loss.sft_loss_coef > 0:
        total = total + loss.sft_loss_coef * sft_loss(log_prob_B, label_B, before.desirable_tokens)
    if loss.aux_loss_coef > 0:
        tokens = (micro_batch["attention_mask"] * is_real(micro_batch)[:, None]).sum()
        aux_loss = output.balancing_loss * tokens / batch.matched_tokens
        total = total + loss.aux_loss_coef * aux_loss
    columns = row_columns(micro_batch, log_prob_B, log_ratio_B, entropy=output.entropy_B)
    return MatchedPart(total.float(), aux_loss.detach(), columns)


def row_columns(micro_batch: MicroBatch, log_prob_B: Tensor, log_ratio_B: Tensor, **more: Tensor) -> Columns:
    """Return what is known of each row, dummies too, for `gather_columns`."""
    known = {
        "row": micro_batch["row"],
        "log_prob": log_prob_B,
        "log_ratio": log_ratio_B,
        "is_desirable": micro_batch["label"],
        "weight": micro_batch["weight"],
        "scored_tokens": micro_batch["loss_mask"].sum(1),
    }
    return {name: column.detach().double() for name, column in (known | more).items()}


def gather_columns(strategy: Strategy, batch: RankBatch, parts: list[Columns]) -> dict[str, NDArray[np.float64]]:
    """Return the columns of the whole batch's rows, [N] each; all ranks must call it, and wait for their devices.

    Args:
        parts: what `row_columns` made of each matched micro-batch.
    """
    names = list(parts[0])
    lines_LC = torch.cat([torch.stack([part[name] for name in names], dim=1) for part in parts])
    columns = dict(zip(names, strategy.gather_rows(lines_LC, batch.matched_lines).T, strict=True))
    return {name: column[columns["row"] >= 0] for name, column in columns.items()}


def read_rows(
    strategy: Strategy, batch: RankBatch, parts: list[Columns], before: BeforeBackward, place: str
) -> tuple[BatchRows, dict[str, NDArray[np.float64]]]:
    """Return the whole batch's rows, and all columns that they came with.

    Raises:
        TrainingError: a log-ratio is not finite; on every rank alike.
    """
    columns = gather_columns(strategy, batch, parts)
    mean = None if before.mismatched_mean is None else float(before.mismatched_mean)
    # A matched row is at fault by itself; a pair may be so for either of its two.
    bad_N = ~np.isfinite(columns["log_ratio"])
    if bad_N.any():
        raise not_finite(place, columns["log_ratio"][bad_N], name_rows(columns["row"][bad_N]))
    if mean is not None and not np.isfinite(mean):
        pairs_N2 = strategy.gather_rows(before.mismatched_rows)
        bad_N = ~np.isfinite(pairs_N2[:, 1])
        named = name_pairs(batch, pairs_N2[bad_N, 0])
        raise not_finite(f"{place}, mismatched pairs", pairs_N2[bad_N, 1], named)
    rows = BatchRows(
        log_prob_N=columns["log_prob"],
        log_ratio_N=columns["log_ratio"],
        is_desirable_N=columns["is_desirable"] > 0.5,
        weight_N=columns["weight"],
        scored_N=columns["scored_tokens"],
        z_ref=float(before.z_ref),
        mismatched_mean=mean,
        row_N=columns["row"],
    )
    return rows, columns


def not_finite(place: str, values: NDArray[np.float64], named: str) -> TrainingError:
    """Return the error for log-probabilities that are not finite; raised on every rank alike."""
    return TrainingError(
        f"{place}: every log-probability must be finite; got {values[0]}, and no update was made. {named}"
    )


def name_rows(row_N: NDArray[np.float64]) -> str:
    """Say which rows to look at, at most ten."""
    numbers = sorted({int(r) for r in row_N})
    return (
        f"Look at row{'s' if len(numbers) > 1 else ''} {_ten_of(numbers)} (counted from 0), or lower --learning_rate."
    )


def name_pairs(batch: RankBatch, row_N: NDArray[np.float64]) -> str:
    """Say which pairs to look at, by whose prompts they have, at most ten."""
    pairs = sorted({(int(i), int(j)) for i, j in zip(batch.rows, batch.kl_rows, strict=True) if i in row_N})
    named = _ten_of([f"row {i}'s prompt with row {j}'s completion" for i, j in pairs])
    return f"Look at {named} (counted from 0), or lower --learning_rate."


def _ten_of(names: Sequence[object]) -> str:
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return ", ".join(str(name) for name in names[:10]) + more
