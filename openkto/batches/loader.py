"""From tokenised rows to the micro-batches that one rank runs in one step.

Shapes:  B = rows in a micro-batch, T = its longest row, P = its tokens, K = its scored tokens, N = rows in the global
         batch, R = ranks.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from openkto.batches.batch import IntArray, batch_bounds, epoch_order
from openkto.batches.layout import Layout
from openkto.batches.micro_batch import MicroBatch, TokenRows, after_prompts, collate, read_pairs
from openkto.batches.pairing import pair_mismatched
from openkto.batches.plan import Plan, plan_micro_batches
from openkto.batches.sharing import PairPlan, plan_after_prompts, plan_shared, sharable_prompts, slots
from openkto.errors import ConfigError, DataError

DEFAULT_ROWS = 8  # where neither limit is given
# The factor for the micro-batches of no_grad forwards, which keep no activations. It fills a GPU; a CPU gains no speed,
# only memory to fill.
WITHOUT_GRADIENT = {"cuda": 4, "cpu": 1}
# Of a plan that shares prompts: a prompt with its own and the mismatched completion is one row's place for two.
ROWS_A_PROMPT = 2
DUMMY_PLACE = -1


class RankBatch(NamedTuple):
    """One rank's share of a global batch, and what all ranks know of the whole.

    A micro-batch is right-padded and holds `input_ids`, `attention_mask`, `loss_mask` (True on the scored completion
    tokens), each [B, T], where the last two are 1 in the flattened rows (`token_index` [P], `scored_index` [K]),
    `label` [B] (True: desirable), `weight` [B] (float64, the row's own) and `row` [B] (source row numbers, -1 in a
    dummy). Mismatched ones carry the names with `kl_` before them. A dummy micro-batch, which keeps ranks in step,
    scores no token. Where rows share prompts, see `collate`; `place` [B] is then a row's place among the batch's pairs:
    N matched ones, N mismatched ones, dummies. Where prompts are reused, each mismatched micro-batch has the prompts of
    the matched one in its place, row by row, and `after_prompts`.
    """

    matched: list[MicroBatch]
    mismatched: list[MicroBatch]
    shared: list[MicroBatch]  # both in one, by `place`, for forwards that share prompts; empty where none do
    rows: NDArray[np.int64]  # [N] source row numbers in batch order
    kl_rows: NDArray[np.int64]  # [N] whose completion each was paired with; empty without mismatched pairs
    same_prompt: int  # pairs of the whole batch that share their prompt
    same_completion: int  # those with another prompt whose completion equals the row's own
    desirable_tokens: int  # on this rank: the scored tokens of the desirable rows
    matched_lines: list[int]  # [R] how many lines each rank's matched micro-batches have together, dummies too
    matched_tokens: int  # of the whole batch, as all below
    mismatched_tokens: int
    slots: int  # what the forwards run: tokens and padding, matched and mismatched
    reuses_prompts: bool = False  # in the policy's mismatched forwards those of its matched ones


class BatchPlan(NamedTuple):
    """The pairs of a global batch, by whose prompt and whose completion they have, and who runs which when."""

    own_N2: IntArray
    matched: PairPlan
    pairs_P2: IntArray  # the mismatched ones, N or none
    mismatched: PairPlan | None
    shared: PairPlan | None  # of both, for forwards that share prompts between them; None where that saves nothing
    reuses_prompts: bool  # whether the policy's mismatched pairs go on after the prompts of its matched rows


def check_pairable(num_rows: int, place: str, cure: str = "Add rows") -> None:
    """Raise DataError for a set of a single row, where a loss needs pairs of different rows."""
    if num_rows == 1:
        raise DataError(
            f"{place}: z_ref is estimated from pairs of different rows; got a set of one row. {cure}, or pass "
            "--loss_type apo_zero_unpaired."
        )


class KTODataLoader:
    """Yields this rank's share of each global batch of an epoch; the next one is made while a step runs.

    The order of rows follows from (seed, epoch), the pairing and the plan from the batch: the same on every rank and,
    except for the shares, for every number of ranks.

    Args:
        dataset: the tokenised rows.
        train_batch_size: rows in a global batch; None takes the whole set in file order as one batch (evaluation).
        micro_train_batch_size: rows in a micro-batch at most; None is 8, or no limit with the next.
        max_tokens_per_micro_batch: tokens in a micro-batch at most, padding among them where rows are padded; of one
            of the ranks that share it. Both limits are for forwards that keep activations for a backward pass.
        needs_mismatched: whether to build the mismatched pairs; a loss without z_ref does without.
        packed, shared_by, larger_without_gradient: see `Layout`; what else it holds follows from the models.
        pin_memory: make batches that a GPU can fetch by itself.
    """

    def __init__(
        self,
        dataset: TokenRows,
        train_batch_size: int | None,
        micro_train_batch_size: int | None = None,
        *,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 42,
        max_tokens_per_micro_batch: int | None = None,
        needs_mismatched: bool = True,
        packed: bool = False,
        shared_by: int = 1,
        larger_without_gradient: int = 1,
        pin_memory: bool = False,
    ) -> None:
        if needs_mismatched:
            check_pairable(len(dataset), dataset.name)
        self.dataset = dataset
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.train_batch_size = train_batch_size
        self.shuffle = train_batch_size is not None
        self.micro_train_batch_size = micro_train_batch_size
        self.max_tokens_per_micro_batch = max_tokens_per_micro_batch
        self.needs_mismatched = needs_mismatched
        self.layout = Layout(packed, shared_by=shared_by, larger_without_gradient=larger_without_gradient)
        self.pin_memory = pin_memory
        self.bounds = batch_bounds(len(dataset), train_batch_size or max(len(dataset), 1))
        self.epoch = 0
        self.first_batch = 0

    def __len__(self) -> int:
        """Return the number of steps in an epoch."""
        return len(self.bounds) - 1

    @property
    def num_rows(self) -> int:
        """The rows in an epoch."""
        return len(self.dataset)

    @property
    def pad_token_id(self) -> int:
        """The id at the places that no token fills; any serves, since masks come from lengths."""
        return self.dataset.pad_token_id if self.layout.pad_token_id is None else self.layout.pad_token_id

    @property
    def longest(self) -> int:
        """The tokens of the longest sequence that any pairing can make."""
        data = self.dataset
        lengths = self.dataset.cut_lengths(
            data.prompt_lengths.max(keepdims=True), data.completion_lengths.max(keepdims=True)
        )
        return int(lengths[0])

    def start_at(self, consumed_samples: int) -> int:
        """Go to where that many rows have been consumed; return the number of steps they made.

        Raises:
            ConfigError: the count does not fall between two steps.
        """
        self.epoch, within = divmod(consumed_samples, self.num_rows)
        self.first_batch = int(np.searchsorted(self.bounds, within))
        if self.bounds[self.first_batch] != within:
            raise ConfigError(
                f"consumed_samples: must be the number of rows after a whole step; got {consumed_samples}. "
                f"The nearest below is {self.epoch * self.num_rows + self.bounds[self.first_batch - 1]}."
            )
        return self.epoch * len(self) + self.first_batch

    def order(self, epoch: int) -> NDArray[np.int64]:
        """Return the order of an epoch's rows, as positions in the data set."""
        return epoch_order(self.num_rows, self.seed, epoch) if self.shuffle else np.arange(self.num_rows)

    def __iter__(self) -> Iterator[RankBatch]:
        """Yield the rest of the current epoch's batches, then stand at the start of the next epoch."""
        order = self.order(self.epoch)
        parts = [order[self.bounds[b] : self.bounds[b + 1]] for b in range(self.first_batch, len(self))]
        with self._worker() as worker:
            coming = [worker.submit(self.make_batch, part) for part in parts[:1]]
            for part in [*parts[1:], None]:
                ready = coming.pop()
                batch = ready.result()
                if part is not None:
                    coming.append(worker.submit(self.make_batch, part))
                yield batch
        self.epoch, self.first_batch = self.epoch + 1, 0

    def _worker(self) -> ThreadPoolExecutor:
        if not self.pin_memory:
            return ThreadPoolExecutor(1, thread_name_prefix="batches")
        # A new thread stands at the first GPU, and would take memory there.
        device = (torch.cuda.current_device(),)
        return ThreadPoolExecutor(1, "batches", initializer=torch.cuda.set_device, initargs=device)

    def pair_lengths(self, prompt_index: IntArray, completion_index: IntArray) -> IntArray:
        """Return the tokens of pairs after the cut, by whose prompt and whose completion they have."""
        data = self.dataset
        lengths: IntArray = data.cut_lengths(
            data.prompt_lengths[prompt_index], data.completion_lengths[completion_index]
        )
        return lengths

    @property
    def max_rows(self) -> int | None:
        """The rows in a micro-batch with gradient at most, or None for no limit."""
        no_limit = self.micro_train_batch_size is None and self.max_tokens is None
        return DEFAULT_ROWS if no_limit else self.micro_train_batch_size

    @property
    def max_tokens(self) -> int | None:
        """The tokens in a rank's part of a micro-batch with gradient at most, or None for no limit."""
        return self.max_tokens_per_micro_batch or self.layout.measured_tokens

    def _limits(self, *, with_gradient: bool) -> tuple[int | None, int | None]:
        """Return the rows and the tokens in a micro-batch at most."""
        factor = 1 if with_gradient else self.layout.larger_without_gradient
        max_rows = None if self.max_rows is None else factor * self.max_rows
        max_tokens = None if self.max_tokens is None else factor * self.max_tokens * self.layout.shared_by
        return max_rows, max_tokens

    def plan(self, lengths_N: IntArray, *, with_gradient: bool) -> Plan:
        """Deal sequences to ranks and micro-batches under the limits; see `plan_micro_batches`."""
        return plan_micro_batches(
            lengths_N,
            self.world_size,
            *self._limits(with_gradient=with_gradient),
            packed=self.layout.packed,
            attention_length=self.layout.attention_length,
            apart_at=self.layout.apart_at,
        )

    def plan_pairs(self, pairs_P2: IntArray, *, with_gradient: bool = False) -> PairPlan:
        """Deal pairs, by whose prompt and whose completion they have, to ranks and micro-batches under the limits."""
        data, lengths_P = self.dataset, self.pair_lengths(pairs_P2[:, 0], pairs_P2[:, 1])
        if not (self.layout.shares_matched if with_gradient else self.layout.shares_prompts):
            return PairPlan(self.plan(lengths_P, with_gradient=with_gradient), lengths_P, np.zeros_like(lengths_P))
        prompt_P = sharable_prompts(data, pairs_P2, lengths_P)
        max_rows, max_tokens = self._limits(with_gradient=with_gradient)
        if max_rows is not None and not with_gradient:
            max_rows *= ROWS_A_PROMPT
        return plan_shared(
            lengths_P,
            prompt_P,
            data.prompt_keys[pairs_P2[:, 0]],
            self.world_size,
            max_rows,
            max_tokens,
            attention_length=self.layout.attention_length,
            with_gradient=with_gradient,
        )

    def _plan_after_prompts(self, matched: PairPlan, own_N2: IntArray, pairs_N2: IntArray) -> PairPlan | None:
        """Return the plan of mismatched pairs that reuse the matched rows' prompts, or None where they do not."""
        if self.layout.held_tokens is None:
            return None
        lengths_N = self.pair_lengths(pairs_N2[:, 0], pairs_N2[:, 1])
        data, own_lengths_N = self.dataset, matched.run_P + matched.reused_P
        whole = sharable_prompts(data, own_N2, own_lengths_N), sharable_prompts(data, pairs_N2, lengths_N)
        # As few as with gradient, since graphs are held.
        _, max_tokens = self._limits(with_gradient=True)
        return plan_after_prompts(matched, lengths_N, np.minimum(*whole), self.layout.held_tokens, max_tokens)

    def pairs_of(self, index_N: IntArray) -> tuple[IntArray, IntArray]:
        """Return the own pairs of a global batch's rows, [N, 2], and the mismatched ones, [N, 2], or none."""
        data, own_N2 = self.dataset, np.stack([index_N, index_N], axis=1)
        if not self.needs_mismatched:
            return own_N2, own_N2[:0]
        partner_N = pair_mismatched(data.prompt_keys[index_N], data.completion_keys[index_N])
        return own_N2, np.stack([index_N, index_N[partner_N]], axis=1)

    def plan_batch(self, index_N: IntArray) -> BatchPlan:
        """Pair the rows of a global batch, by their positions in the data set, and deal all pairs."""
        own_N2, pairs_P2 = self.pairs_of(index_N)
        matched = self.plan_pairs(own_N2, with_gradient=self.shuffle)
        after, mismatched, shared = None, None, None
        if self.needs_mismatched:
            after = self._plan_after_prompts(matched, own_N2, pairs_P2)
            mismatched = after or self.plan_pairs(pairs_P2)
        if self.layout.shares_pairs:
            shared = self.plan_pairs(np.concatenate([own_N2, pairs_P2]))
        is_worth_it = shared is not None and bool(shared.reused_P.any())
        return BatchPlan(own_N2, matched, pairs_P2, mismatched, shared if is_worth_it else None, after is not None)

    def make_batch(self, index_N: IntArray) -> RankBatch:
        """Return this rank's share of a global batch, by the positions of its rows in the data set."""
        data, planned = self.dataset, self.plan_batch(index_N)
        own_N2, pairs_P2, place_P = planned.own_N2, planned.pairs_P2, np.arange(len(planned.own_N2) * 2)
        matched = self.of_rank(own_N2, planned.matched, place_P[: len(own_N2)])
        mismatched: list[MicroBatch] = []
        if planned.mismatched is not None:
            prompts = matched if planned.reuses_prompts else None
            mismatched = self.of_rank(pairs_P2, planned.mismatched, place_P[len(own_N2) :], prompts)
        shared: list[MicroBatch] = []
        if planned.shared is not None:
            every_P2 = np.concatenate([own_N2, pairs_P2])
            shared = self.of_rank(every_P2, planned.shared, place_P[: len(every_P2)])
        prompts_P2, completions_P2 = data.prompt_keys[pairs_P2], data.completion_keys[pairs_P2]
        same_prompt_P = prompts_P2[:, 0] == prompts_P2[:, 1]
        same_completion_P = (completions_P2[:, 0] == completions_P2[:, 1]) & ~same_prompt_P
        shares = planned.matched.plan
        return RankBatch(
            matched=matched,
            mismatched=[{f"kl_{name}": tensor for name, tensor in m.items()} for m in mismatched],
            shared=shared,
            rows=data.rows[index_N],
            kl_rows=data.rows[pairs_P2[:, 1]],
            same_prompt=int(same_prompt_P.sum()),
            same_completion=int(same_completion_P.sum()),
            desirable_tokens=sum(int(m["loss_mask"][m["label"]].sum()) for m in matched),
            matched_lines=[sum(max(1, len(of_ranks[rank])) for of_ranks in shares) for rank in range(self.world_size)],
            matched_tokens=int((planned.matched.run_P + planned.matched.reused_P).sum()),
            mismatched_tokens=0 if planned.mismatched is None else int(planned.mismatched.run_P.sum()),
            slots=sum(slots(one, self.layout) for one in (planned.matched, planned.mismatched) if one is not None),
            reuses_prompts=planned.reuses_prompts,
        )

    def of_rank(
        self,
        pairs_P2: IntArray,
        planned: PairPlan,
        place_P: IntArray | None = None,
        matched: list[MicroBatch] | None = None,
    ) -> list[MicroBatch]:
        """Return this rank's micro-batches of a plan.

        Args:
            place_P: [P], each pair's place among the batch's, for pairs that are run both alone and in `shared`.
            matched: this rank's micro-batches of rows in which the prompts run that these pairs reuse.
        """
        batches = []
        for m, share in enumerate(shares[self.rank] for shares in planned.plan):
            reused_B = planned.reused_P[share]
            batch = self.micro_batch(pairs_P2[share], reused_B if matched is None else None)
            if matched is not None:
                batch |= after_prompts(batch, matched[m], reused_B if len(share) else np.zeros(1, dtype=np.int64))
            if self.layout.shares_pairs and place_P is not None:
                batch["place"] = torch.from_numpy(place_P[share] if len(share) else np.array([DUMMY_PLACE]))
            batches.append(self._pinned(batch))
        return batches

    def micro_batch(self, pairs_B2: IntArray, reused_B: IntArray | None) -> MicroBatch:
        """Return pairs as a micro-batch, with the prompts' labels and row numbers; no pairs give a dummy row.

        Args:
            reused_B: [B], see `collate`.
        """
        return collate(*read_pairs(self.dataset, pairs_B2), self.pad_token_id, reused_B)

    def _pinned(self, micro_batch: MicroBatch) -> MicroBatch:
        if not self.pin_memory:
            return micro_batch
        return {name: tensor.pin_memory() for name, tensor in micro_batch.items()}
