"""The forward passes of a batch, without gradient for training and evaluation alike and with it.

What comes before a step's first backward has one of two orders. `forward_without_gradient` runs the policy on
mismatched pairs and leaves its matched rows for later, each micro-batch right before its backward. Where prompts are
reused, `forward_before_backward` runs each matched micro-batch, and the mismatched pairs with its prompts after these:
no prompt runs twice, and the graphs are held until z_ref is known.

Shapes:  B = rows in a micro-batch, K = its scored tokens, L = rows on this rank.
Units:   nats.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from openkto.batches.loader import RankBatch
from openkto.batches.micro_batch import REST, MicroBatch
from openkto.models.actor import ActorOutput
from openkto.models.kept_keys import KeptKeys
from openkto.models.loss import KTOLoss, reference_point
from openkto.trainer.protocols import Reference, Strategy


class BeforeBackward(NamedTuple):
    """What comes before a batch's first backward; its tensors are on the device, and nobody has waited for them."""

    ref_log_prob: list[Tensor]  # of each matched micro-batch, [B] float64, or [K] float32 for a loss by token
    log_prob: list[Tensor]  # likewise, the policy's without gradient, for an evaluation
    outputs: list[ActorOutput]  # the policy's of each matched micro-batch, with its graph; empty where it comes later
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
    between: Callable[[], None],
    shift: float = 0.0,
    *,
    with_matched: bool = False,
) -> BeforeBackward:
    """Run the policy on the mismatched pairs and the reference on everything, then agree on z_ref.

    All of it comes before the first backward: z_ref is exact for every micro-batch, and ZeRO-3 keeps its prefetch
    order. The policy is left in evaluation mode: an adapter's dropout belongs to the forwards that train.

    Args:
        between: called before each forward, as often on every rank.
        shift: nats: the reference point of a loss without z_ref.
        with_matched: also run the policy on the matched rows, for an evaluation.

    Whether all is finite comes to light in `read_rows`, where the host waits anyway.
    """
    mismatched = [strip_prefix(m) for m in batch.mismatched]
    model.eval()

    def of_policy(micro_batches: list[MicroBatch]) -> list[Tensor]:
        return forward_all(model, micro_batches, strategy.device, between, with_tokens=loss.facts.by_token)

    both = [*mismatched, *batch.matched]
    policy = _of_each(of_policy, both, strategy, batch) if with_matched else of_policy(mismatched)
    of_pairs, of_rows = policy[: len(mismatched)], policy[len(mismatched) :]
    ref_log_prob = _of_reference(reference, strategy, loss, batch, between)
    before = _agree_on_z_ref(strategy, loss, batch, of_pairs, ref_log_prob, shift)
    return before._replace(log_prob=of_rows)


def forward_before_backward(
    model: Any,
    reference: Reference,
    strategy: Strategy,
    loss: KTOLoss,
    batch: RankBatch,
    between: Callable[[], None],
    shift: float,
    with_entropy: bool,
) -> BeforeBackward:
    """Run what a step runs before its first backward, in the order that the batch is laid out for.

    Where prompts are reused, the policy runs each matched micro-batch, with its graph, and then the mismatched pairs
    with its prompts. The reference comes first: no graph is held yet, and where it is the policy with another adapter,
    nothing changes between a forward and its backward. See `forward_without_gradient` for the arguments.
    """
    if not batch.reuses_prompts:
        return forward_without_gradient(model, reference, strategy, loss, batch, between, shift)
    model.eval()
    ref_log_prob = _of_reference(reference, strategy, loss, batch, between)
    outputs, of_pairs = [], []
    for matched, pairs in zip(batch.matched, batch.mismatched, strict=True):
        between()
        kept, on_device = KeptKeys(), to_device(matched, strategy.device)
        model.train()
        outputs.append(forward_with_gradient(model, loss, on_device, with_entropy, kept))
        between()
        kept.start_taking()
        model.eval()
        of_pairs.append(_forward_after(model, strip_prefix(pairs), kept, strategy, loss))
        kept.close()
    return _agree_on_z_ref(strategy, loss, batch, of_pairs, ref_log_prob, shift)._replace(outputs=outputs)


@torch.no_grad()
def _forward_after(model: Any, pairs: MicroBatch, kept: KeptKeys, strategy: Strategy, loss: KTOLoss) -> Tensor:
    """Return the log-probabilities of mismatched pairs whose prompts have just run."""
    pairs = to_device(pairs, strategy.device)
    rest = pairs | {name: pairs[own] for name, own in REST.items()}
    output: ActorOutput = model(*model_inputs(rest), kept_keys=kept, with_tokens=loss.facts.by_token)
    return output.log_prob_K if loss.facts.by_token else output.log_prob_B


@torch.no_grad()
def _of_reference(
    reference: Reference, strategy: Strategy, loss: KTOLoss, batch: RankBatch, between: Callable[[], None]
) -> list[Tensor]:
    """Return the reference's log-probabilities of each mismatched micro-batch, then of each matched one."""

    def log_probs(micro_batches: list[MicroBatch]) -> list[Tensor]:
        return reference.log_probs(micro_batches, between, with_tokens=loss.facts.by_token)

    return _of_each(log_probs, [*map(strip_prefix, batch.mismatched), *batch.matched], strategy, batch)


@torch.no_grad()
def _agree_on_z_ref(
    strategy: Strategy,
    loss: KTOLoss,
    batch: RankBatch,
    of_pairs: list[Tensor],
    ref_log_prob: list[Tensor],
    shift: float,
) -> BeforeBackward:
    """Return what all ranks know before the first backward, without the policy's results on matched rows.

    Args:
        of_pairs: the policy's log-probabilities of each mismatched micro-batch.
        ref_log_prob: the reference's, of each mismatched micro-batch, then of each matched one.
    """
    device, count = strategy.device, len(of_pairs)
    pairs = [
        torch.stack([m["kl_row"].double(), loss.log_ratios(p, r, m["kl_loss_mask"])], dim=1)
        for p, r, m in zip(
            of_pairs,
            ref_log_prob[:count],
            [to_device({name: m[name] for name in ("kl_row", "kl_loss_mask")}, device) for m in batch.mismatched],
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
    return BeforeBackward(ref_log_prob[count:], [], [], z_ref, mean, totals[1], pairs_L2)


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


def forward_with_gradient(
    model: Any, loss: KTOLoss, micro_batch: MicroBatch, with_entropy: bool, kept_keys: KeptKeys | None = None
) -> ActorOutput:
    """Run the policy on a matched micro-batch, which is on the device, with gradient."""
    output: ActorOutput = model(
        *model_inputs(micro_batch),
        with_entropy=with_entropy,
        with_balancing_loss=loss.aux_loss_coef > 0,
        with_tokens=loss.facts.by_token,
        kept_keys=kept_keys,
    )
    return output


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
