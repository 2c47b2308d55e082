"""What a step runs, from the rows' lengths: the run's own batches, pairs and micro-batches, without their tokens.

Shapes:  N = rows in a global batch.
Units:   tokens, FLOPs over all ranks.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from openkto.batches.batch import IntArray
from openkto.batches.loader import KTODataLoader
from openkto.batches.pairing import pair_mismatched
from openkto.batches.plan import plan_cost, row_costs
from openkto.planning.activations import Shape
from openkto.report.flops import ForwardWork

BATCHES = 200  # of the first epoch are looked at, evenly spread


@dataclass(frozen=True)
class Step:
    """The mean of a run's steps; all but the first two are FLOPs.

    Args:
        rows, tokens: of the matched rows.
        training: of the forward and backward on matched rows; likewise the others.
        head_again: of the head, which the backward computes a second time.
        layers_again: of the layers, where they are recomputed as a whole.
        mismatched: of the policy's forward on mismatched pairs.
        matched_reference, mismatched_reference: of the reference's forwards.
        waiting: how much longer the busiest rank takes than the mean of the ranks, in ratio.
    """

    rows: float
    tokens: float
    training: float
    head_again: float
    layers_again: float
    mismatched: float
    matched_reference: float
    mismatched_reference: float
    waiting: float

    def flops(self, *, is_recomputed: bool, is_cached: bool) -> float:
        """Return what a step computes, useful or again."""
        computed = self.training + self.head_again + self.mismatched + (self.layers_again if is_recomputed else 0.0)
        return computed + (0.0 if is_cached else self.matched_reference + self.mismatched_reference)


class Dealt(NamedTuple):
    """A batch as the ranks will run it: its rows' and pairs' lengths, their scored tokens, and who runs which when."""

    lengths_N: IntArray
    scored_N: IntArray
    plan: list[list[IntArray]]


Batch = tuple[Dealt, Dealt | None]  # its matched rows, and its mismatched pairs where the loss takes them


@dataclass
class EqualRows:
    """Rows of one length, behind what the loader asks of a data set before it reads tokens; half of each is prompt."""

    count: int
    length: int
    pad_token_id: int = 0
    name: str = "assumed rows"

    def __post_init__(self) -> None:
        self.rows = self.prompt_keys = self.completion_keys = np.arange(self.count, dtype=np.int64)
        self.labels = self.rows % 2 == 0
        prompt = self.length // 2
        self.prompt_lengths: NDArray[np.int32] = np.full(self.count, prompt, dtype=np.int32)
        self.completion_lengths: NDArray[np.int32] = np.full(self.count, self.length - prompt, dtype=np.int32)

    def __len__(self) -> int:
        return self.count

    def cut_lengths(self, prompt_lengths: IntArray, completion_lengths: IntArray) -> IntArray:
        """Return the tokens of pairs; none is longer than the rows."""
        return prompt_lengths + completion_lengths


def dealt_batches(loader: KTODataLoader) -> list[Batch]:
    """Return some of the first epoch's batches as the ranks get them."""
    order, count = loader.order(0), len(loader)
    chosen = np.unique(np.linspace(0, count - 1, min(count, BATCHES)).astype(int))
    return [_dealt(loader, order[loader.bounds[b] : loader.bounds[b + 1]]) for b in chosen]


def _dealt(loader: KTODataLoader, index_N: IntArray) -> Batch:
    data = loader.dataset

    def deal(partner_N: IntArray, *, with_gradient: bool) -> Dealt:
        lengths_N = loader.pair_lengths(index_N, partner_N)
        scored_N: IntArray = np.minimum(data.completion_lengths[partner_N], lengths_N - 1)  # never a row's first token
        return Dealt(lengths_N, scored_N, loader.plan(lengths_N, with_gradient=with_gradient))

    matched = deal(index_N, with_gradient=True)
    if not loader.needs_mismatched:
        return matched, None
    partner_N = pair_mismatched(data.prompt_keys[index_N], data.completion_keys[index_N])
    return matched, deal(index_N[partner_N], with_gradient=False)


def largest_shapes(batches: list[Batch], *, packed: bool) -> tuple[Shape, Shape]:
    """Return the largest micro-batches with gradient and without."""
    matched = [_largest(one, packed) for one, _ in batches]
    mismatched = [_largest(one, packed) for _, one in batches if one is not None]
    return max(matched, key=_slots), max(matched + mismatched, key=_slots)


def _largest(dealt: Dealt, packed: bool) -> Shape:
    shares = [share for shares in dealt.plan for share in shares if len(share)]
    return max((_shape(dealt, share, packed) for share in shares), key=_slots)


def _shape(dealt: Dealt, share: IntArray, packed: bool) -> Shape:
    lengths, scored = dealt.lengths_N[share], int(dealt.scored_N[share].sum())
    return Shape(1, int(lengths.sum()), scored) if packed else Shape(len(share), int(lengths.max()), scored)


def _slots(shape: Shape) -> int:
    return shape.rows * shape.length


def mean_step(loader: KTODataLoader, batches: list[Batch], policy: ForwardWork, reference: ForwardWork) -> Step:
    """Return the mean of some of the first epoch's steps, which the loader's batches make."""
    found = [_step(loader, *one, policy, reference) for one in batches]
    return Step(**{name: float(np.mean([vars(one)[name] for one in found])) for name in vars(found[0])})


def _step(
    loader: KTODataLoader, matched: Dealt, pairs: Dealt | None, policy: ForwardWork, reference: ForwardWork
) -> Step:
    lengths, scored = torch.from_numpy(matched.lengths_N.astype(np.int64)), int(matched.scored_N.sum())
    mismatched = mismatched_reference = 0.0
    if pairs is not None:
        sizes = torch.from_numpy(pairs.lengths_N.astype(np.int64)), int(pairs.scored_N.sum())
        mismatched, mismatched_reference = policy.forward(*sizes), reference.forward(*sizes)
    costs_N = row_costs(matched.lengths_N, loader.layout.attention_length)
    return Step(
        rows=len(lengths),
        tokens=float(lengths.sum()),
        training=policy.training(lengths, scored),
        head_again=policy.head_again(scored),
        layers_again=policy.forward(lengths, 0),
        mismatched=mismatched,
        matched_reference=reference.forward(lengths, scored),
        mismatched_reference=mismatched_reference,
        waiting=plan_cost(matched.plan, costs_N) * loader.world_size / float(costs_N.sum()),
    )
