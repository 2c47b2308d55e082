"""The forward passes of a batch, without gradient for training and evaluation alike and with it, and their results.

Shapes:  B = rows in a micro-batch, L = rows on this rank, N = rows in the global batch (all ranks).
Units:   nats.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from openkto.batches.loader import RankBatch
from openkto.batches.micro_batch import MicroBatch
from openkto.errors import TrainingError
from openkto.models.loss import KTOLoss, reference_point, sft_loss
from openkto.report.metrics import BatchRows
from openkto.trainer.protocols import Reference, Strategy


class BeforeGradient(NamedTuple):
    """What a batch's forwards without gradient give; its tensors are on the device, and nobody has waited for them."""

    ref_log_prob: list[Tensor]  # of each matched micro-batch, [B] float64, or [K] float32 for a loss by token
    log_prob: list[Tensor]  # likewise, the policy's; empty where its matched forwards come later
    z_ref: Tensor  # scalar, float64: the loss's reference point, wherever it comes from
    mismatched_mean: Tensor | None  # the same before the clamp; None where the loss needs no z_ref
    desirable_tokens: Tensor  # scalar: the scored tokens of the whole batch's desirable rows
    mismatched_rows: Tensor  # [rows, 2] float64: this rank's pairs by row number, and their log-ratios


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
    *,
    with_matched: bool = False,
) -> BeforeGradient:
    """Run the policy on the mismatched pairs and the reference on everything, then agree on z_ref.

    All of it comes before the first backward: z_ref is exact for every micro-batch, and ZeRO-3 keeps its prefetch
    order. The policy is left in evaluation mode: an adapter's dropout belongs to the forwards that train.

    Args:
        place: names the batch in an error.
        between: called before each forward, as often on every rank.
        shift: nats: the reference point of a loss without z_ref.
        with_matched: also run the policy on the matched rows, for an evaluation.

    Whether all is finite comes to light in `read_rows`, where the host waits anyway.
    """
    device, mismatched = strategy.device, [strip_prefix(m) for m in batch.mismatched]
    model.eval()
    by_token, both = loss.facts.by_token, [*mismatched, *batch.matched]

    def of_policy(micro_batches: list[MicroBatch]) -> list[Tensor]:
        return forward_all(model, micro_batches, device, between, with_tokens=by_token)

    def of_reference(micro_batches: list[MicroBatch]) -> list[Tensor]:
        return reference.log_probs(micro_batches, between, with_tokens=by_token)

    policy = _of_each(of_policy, both, strategy, batch) if with_matched else of_policy(mismatched)
    ref_log_prob = _of_each(of_reference, both, strategy, batch)
    ref_mismatched, ref_matched = ref_log_prob[: len(mismatched)], ref_log_prob[len(mismatched) :]
    pairs = [
        torch.stack([m["row"].double(), loss.log_ratios(p, r, m["loss_mask"])], dim=1)
        for p, r, m in zip(
            policy[: len(mismatched)],
            ref_mismatched,
            [to_device({name: m[name] for name in ("row", "loss_mask")}, device) for m in mismatched],
            strict=True,
        )
    ]
    pairs_L2 = torch.cat(pairs) if pairs else torch.zeros(0, 2, dtype=torch.float64, device=device)
    # A dummy's log-ratio is 0.
    totals = strategy.all_reduce(torch.stack([pairs_L2[:, 1].sum(), _scalar(batch.desirable_tokens, device)]))
    if loss.facts.needs_z_ref:
        num_rows = _scalar(len(batch.rows), device)
        z_ref, mean = reference_point(totals[0], num_rows), totals[0] / num_rows
    else:
        z_ref, mean = _scalar(shift, device), None
    return BeforeGradient(ref_matched, policy[len(mismatched) :], z_ref, mean, totals[1], pairs_L2)


def _of_each(
    log_probs: Callable[[list[MicroBatch]], list[Tensor]],
    micro_batches: list[MicroBatch],
    strategy: Strategy,
    batch: RankBatch,
) -> list[Tensor]:
    """Return what a model gives for each micro-batch, having run all the batch's pairs by prompt where it may."""
    if not batch.shared:
        return log_probs(micro_batches)
    places, device = 2 * len(batch.rows) + 1, strategy.device
    of_place = torch.zeros(places, dtype=torch.float64, device=device)
    for micro_batch, log_prob_B in zip(batch.shared, log_probs(batch.shared), strict=True):
        of_place[micro_batch["place"].to(device, non_blocking=True)] = log_prob_B
    # All pairs of a prompt may have run on another rank than the one that needs some of them.
    of_place = strategy.all_reduce(of_place)
    return [of_place[m["place"].to(device, non_blocking=True)] for m in micro_batches]


class MatchedPart(NamedTuple):
    """What the matched forward of a micro-batch gives."""

    loss: Tensor  # scalar, float32, with the graph: its part of the global batch's loss
    aux_loss: Tensor  # scalar, without: its part of the balancing loss; 0 where there is none
    columns: "Columns"


def forward_with_gradient(
    model: Any,
    loss: KTOLoss,
    batch: RankBatch,
    micro_batch: MicroBatch,
    ref_log_prob: Tensor,
    before: BeforeGradient,
    *,
    with_entropy: bool,
) -> MatchedPart:
    """Run the policy on a matched micro-batch, with gradient, and return its part of the batch's loss.

    Args:
        micro_batch: one of `batch.matched`, on the device.
        ref_log_prob: its part of `before.ref_log_prob`.
    """
    by_token, has_aux_loss = loss.facts.by_token, loss.aux_loss_coef > 0
    output = model(
        *model_inputs(micro_batch), with_entropy=with_entropy, with_balancing_loss=has_aux_loss, with_tokens=by_token
    )
    label_B, mask_BT = micro_batch["label"], micro_batch["loss_mask"]
    log_prob = output.log_prob_K if by_token else output.log_prob_B
    log_ratio_B = loss.log_ratios(log_prob, ref_log_prob, mask_BT)
    log_prob_B = loss.row_log_probs(log_prob, mask_BT)
    losses_B = loss(log_ratio_B, label_B, before.z_ref, micro_batch["weight"])
    # A dummy row's log-ratio is the constant 0: it has no gradient, and its loss is not reported.
    total, aux_loss = losses_B.sum() / len(batch.rows), torch.zeros((), device=losses_B.device)
    if loss.sft_loss_coef > 0:
        total = total + loss.sft_loss_coef * sft_loss(log_prob_B, label_B, before.desirable_tokens)
    if has_aux_loss:
        tokens = (micro_batch["attention_mask"] * is_real(micro_batch)[:, None]).sum()
        aux_loss = output.balancing_loss * tokens / batch.matched_tokens
        total = total + loss.aux_loss_coef * aux_loss
    columns = row_columns(micro_batch, log_prob_B, log_ratio_B, entropy=output.entropy_B)
    return MatchedPart(total.float(), aux_loss.detach(), columns)


def _scalar(number: float, device: torch.device) -> Tensor:
    """Return the number on the device, float64, filled in there: a copy would make the host wait."""
    return torch.full((), float(number), dtype=torch.float64, device=device)


def forward(model: Any, micro_batch: MicroBatch, device: torch.device, *, with_tokens: bool = False) -> Tensor:
    """Return the micro-batch's log-probabilities, [B] float64, or those of its scored tokens, [K] float32."""
    inputs = model_inputs(to_device(micro_batch, device))
    return model(*inputs, with_tokens=True).log_prob_K if with_tokens else model(*inputs).log_prob_B


def model_inputs(micro_batch: MicroBatch) -> tuple[Tensor, ...]:
    """Return what an `Actor` takes of a micro-batch."""
    names = ["input_ids", "attention_mask", "loss_mask", "token_index", "scored_index"]
    if "place_index" in micro_batch:  # rows share prompts
        names += ["place_index", "query_bounds"]
    return tuple(micro_batch[name] for name in names)


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


Columns = dict[str, Tensor]  # what is known of a micro-batch's rows, by name, [B] float64 each


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
    strategy: Strategy, batch: RankBatch, parts: list[Columns], before: BeforeGradient, place: str
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
