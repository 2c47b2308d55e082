"""What a step runs, from the rows' lengths: the run's own batches, pairs and micro-batches, without their tokens.

Shapes:  N = rows in a global batch, P = pairs of a prompt and a completion, B = those of a micro-batch.
Units:   tokens, FLOPs over all ranks.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from openkto.batches.batch import IntArray
from openkto.batches.loader import BatchPlan, KTODataLoader
from openkto.batches.plan import plan_cost, row_costs
from openkto.batches.sharing import PairPlan
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
        reference: of the reference's forwards, where they run in the step.
        filling: of the reference's, where they fill a cache before the run: a step's of the first epoch.
        filling_later: a step's of a later epoch, whose mismatched pairs are others.
        waiting: how much longer the busiest rank takes than the mean of the ranks, in ratio.
    """

    rows: float
    tokens: float
    training: float
    head_again: float
    layers_again: float
    mismatched: float
    reference: float
    filling: float
    filling_later: float
    waiting: float

    def flops(self, *, is_recomputed: bool, is_cached: bool) -> float:
        """Return what a step computes, useful or again."""
        computed = self.training + self.head_again + self.mismatched + (self.layers_again if is_recomputed else 0.0)
        return computed + (0.0 if is_cached else self.reference)


class PairSizes(NamedTuple):
    """The tokens of pairs that run together or one after another, [P]."""

    lengths_P: IntArray
    scored_P: IntArray
    reused_P: IntArray  # of its prompt, which run in another pair

    def forward(self, work: ForwardWork) -> float:
        """Return the FLOPs of a forward on all of them."""
        return work.forward(*self._for_work())

    def training(self, work: ForwardWork) -> float:
        """Return the FLOPs of a forward on all of them and its backward."""
        return work.training(*self._for_work())

    def _for_work(self) -> tuple[torch.Tensor, int, torch.Tensor]:
        lengths_P, reused_P = (torch.from_numpy(n.astype(np.int64)) for n in (self.lengths_P, self.reused_P))
        return lengths_P, int(self.scored_P.sum()), reused_P


@dataclass
class EqualRows:
    """Rows of one length, behind what the loader asks of a data set before it reads tokens; half of each is prompt."""

    count: int
    length: int
    pad_token_id: int = 0
    name: str = "assumed rows"
    truncation: str = "completion"

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


def dealt_batches(loader: KTODataLoader) -> list[BatchPlan]:
    """Return some of the first epoch's batches as the ranks get them."""
    order, count = loader.order(0), len(loader)
    chosen = np.unique(np.linspace(0, count - 1, min(count, BATCHES)).astype(int))
    return [loader.plan_batch(order[loader.bounds[b] : loader.bounds[b + 1]]) for b in chosen]


def _sizes(loader: KTODataLoader, pairs_P2: IntArray, planned: PairPlan) -> PairSizes:
    lengths_P = planned.run_P + planned.reused_P
    # Never a row's first token.
    scored_P: IntArray = np.minimum(loader.dataset.completion_lengths[pairs_P2[:, 1]], lengths_P - 1)
    return PairSizes(lengths_P, scored_P, planned.reused_P)


def largest_shapes(loader: KTODataLoader, batches: list[BatchPlan]) -> tuple[Shape, Shape]:
    """Return the largest micro-batches with gradient and without."""
    matched, others = [], []
    for batch in batches:
        matched.append(_largest(loader, batch.own_N2, batch.matched))
        every_P2 = np.concatenate([batch.own_N2, batch.pairs_P2])
        for pairs_P2, planned in ((batch.pairs_P2, batch.mismatched), (every_P2, batch.shared)):
            others += [] if planned is None else [_largest(loader, pairs_P2, planned)]
    return max(matched, key=_slots), max(matched + others, key=_slots)


def _largest(loader: KTODataLoader, pairs_P2: IntArray, planned: PairPlan) -> Shape:
    """Return the largest micro-batch of a plan."""
    scored_P, run_P, packed = _sizes(loader, pairs_P2, planned).scored_P, planned.run_P, loader.layout.packed
    shares = [share for shares in planned.plan for share in shares if len(share)]
    return max((_shape(run_P[share], int(scored_P[share].sum()), packed) for share in shares), key=_slots)


def _shape(run_B: IntArray, scored: int, packed: bool) -> Shape:
    return Shape(1, int(run_B.sum()), scored) if packed else Shape(len(run_B), int(run_B.max()), scored)


def _slots(shape: Shape) -> int:
    return shape.rows * shape.length


def mean_step(loader: KTODataLoader, batches: list[BatchPlan], policy: ForwardWork, reference: ForwardWork) -> Step:
    """Return the mean of some of the first epoch's steps, which the loader's batches make."""
    found = [_step(loader, one, policy, reference) for one in batches]
    mean = {name: float(np.mean([one[name] for one in found])) for name in found[0]}
    pairs_P2 = np.concatenate([one.pairs_P2 for one in batches])
    every_P2 = np.concatenate([*(one.own_N2 for one in batches), pairs_P2])
    # What fills a cache has the pairs of all batches before it, and so shares more prompts than a step does.
    filling, later = (
        _planned_together(loader, some).forward(reference) / len(batches) for some in (every_P2, pairs_P2)
    )
    return Step(**mean, filling=filling, filling_later=later)


def _planned_together(loader: KTODataLoader, pairs_P2: IntArray) -> PairSizes:
    """Return the sizes of pairs that are planned without regard to batches; a plan takes its time."""
    lengths_P = loader.pair_lengths(pairs_P2[:, 0], pairs_P2[:, 1])
    planned = PairPlan([], lengths_P, np.zeros_like(lengths_P))
    if loader.layout.shares_prompts:
        planned = loader.plan_pairs(pairs_P2)
    return _sizes(loader, pairs_P2, planned)


def _step(loader: KTODataLoader, batch: BatchPlan, policy: ForwardWork, reference: ForwardWork) -> dict[str, float]:
    """Return what `Step` has of one step."""
    matched = _sizes(loader, batch.own_N2, batch.matched)
    of_reference, mismatched = [matched], 0.0
    if batch.mismatched is not None:
        pairs = _sizes(loader, batch.pairs_P2, batch.mismatched)
        mismatched = pairs.forward(policy)
        # The reference has no prompts of the policy's to go on after.
        of_reference.append(pairs._replace(reused_P=0 * pairs.reused_P) if batch.reuses_prompts else pairs)
    if batch.shared is not None:
        of_reference = [_sizes(loader, np.concatenate([batch.own_N2, batch.pairs_P2]), batch.shared)]
    costs_N, reused_N = (row_costs(n, loader.layout.attention_length) for n in (matched.lengths_P, matched.reused_P))
    costs_N -= reused_N
    return {
        "rows": len(matched.lengths_P),
        "tokens": float(matched.lengths_P.sum()),
        "training": matched.training(policy),
        "head_again": policy.head_again(int(matched.scored_P.sum())),
        "layers_again": matched._replace(scored_P=0 * matched.scored_P).forward(policy),
        "mismatched": mismatched,
        "reference": sum(part.forward(reference) for part in of_reference),
        "waiting": plan_cost(batch.matched.plan, costs_N) * loader.world_size / float(costs_N.sum()),
    }
