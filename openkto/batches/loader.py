"""From tokenised rows to the micro-batches that one rank runs in one step.

Shapes:  B = rows in a micro-batch, T = its longest row, P = its tokens, K = its scored tokens, N = rows in the global
         batch, R = ranks.
"""

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from openkto.batches.batch import IntArray, batch_bounds, epoch_order
from openkto.batches.pairing import pair_mismatched
from openkto.batches.plan import Plan, plan_micro_batches
from openkto.errors import ConfigError, DataError

MicroBatch = dict[str, Tensor]

DEFAULT_ROWS = 8  # where neither limit is given
# The factor for the micro-batches of no_grad forwards, which keep no activations. It fills a GPU; a CPU gains no speed,
# only memory to fill.
WITHOUT_GRADIENT = {"cuda": 4, "cpu": 1}
DUMMY_TOKENS = 2


@dataclass(frozen=True)
class Layout:
    """How the models run rows: what the plan of micro-batches follows besides the user's limits."""

    packed: bool = False  # laid end to end, so that padding costs nothing
    attention_length: float = math.inf  # at which a row's attention costs as much as all else in the model
    apart_at: tuple[int, ...] = ()  # tokens, rising: rows up to such a length and longer ones share no micro-batch
    shared_by: int = 1  # ranks that run each micro-batch together, each an equal part of its tokens
    larger_without_gradient: int = 1  # factor for the micro-batches of no_grad forwards
    measured_tokens: int | None = None  # in a rank's part of a micro-batch, where that was measured
    pad_token_id: int | None = None  # None is the data set's own


class TokenRows(Protocol):
    """What the loader asks of a data set; `UnpairedPreferenceDataset` is one."""

    rows: NDArray[np.int64]
    labels: NDArray[np.bool_]
    prompt_keys: NDArray[np.int64]
    completion_keys: NDArray[np.int64]
    prompt_lengths: NDArray[np.int32]
    completion_lengths: NDArray[np.int32]
    pad_token_id: int
    name: str

    def __len__(self) -> int: ...

    def __getitem__(self, i: int) -> dict: ...

    def cut(
        self, prompt_ids: list[int], completion_ids: list[int], completion_mask: list[bool]
    ) -> tuple[list[int], list[int], list[bool]]: ...

    def cut_lengths(self, prompt_lengths: NDArray, completion_lengths: NDArray) -> NDArray: ...


class RankBatch(NamedTuple):
    """One rank's share of a global batch, and what all ranks know of the whole.

    A micro-batch is right-padded and holds `input_ids`, `attention_mask`, `loss_mask` (True on the scored completion
    tokens), each [B, T], where the last two are 1 in the flattened rows (`token_index` [P], `scored_index` [K]),
    `label` [B] (True: desirable), `weight` [B] (float64, the row's own) and `row` [B] (source row numbers, -1 in a
    dummy). Mismatched ones carry the names with `kl_` before them. A dummy micro-batch, which keeps ranks in step,
    scores no token.
    """

    matched: list[MicroBatch]
    mismatched: list[MicroBatch]
    rows: NDArray[np.int64]  # [N] source row numbers in batch order
    kl_rows: NDArray[np.int64]  # [N] whose completion each was paired with; empty without mismatched pairs
    same_prompt: int  # pairs of the whole batch that share their prompt
    same_completion: int  # those with another prompt whose completion equals the row's own
    desirable_tokens: int  # on this rank: the scored tokens of the desirable rows
    matched_lines: list[int]  # [R] how many lines each rank's matched micro-batches have together, dummies too
    matched_tokens: int  # of the whole batch, as all below
    mismatched_tokens: int
    slots: int  # what the forwards run: tokens and padding, matched and mismatched


def collate(
    sequences: list[tuple[list[int], list[int], list[bool]]], rows: list[dict], pad_token_id: int
) -> MicroBatch:
    """Pad (prompt_ids, completion_ids, completion_mask) triples into one micro-batch; none at all gives a dummy row.

    Args:
        rows: where each one's label, weight and row number stand.
    """
    if not sequences:
        # A few tokens, none of them scored: enough for every layer to run, and for nothing to count.
        sequences = [([pad_token_id], [pad_token_id] * (DUMMY_TOKENS - 1), [False] * (DUMMY_TOKENS - 1))]
        rows = [{"label": False, "weight": 1.0, "row": -1}]
    longest = max(len(prompt) + len(completion) for prompt, completion, _ in sequences)
    input_ids_BT = np.full((len(sequences), longest), pad_token_id, dtype=np.int64)
    attention_mask_BT = np.zeros((len(sequences), longest), dtype=np.int64)
    loss_mask_BT = np.zeros((len(sequences), longest), dtype=np.bool_)
    for b, (prompt, completion, mask) in enumerate(sequences):
        start, end = len(prompt), len(prompt) + len(completion)
        input_ids_BT[b, :start] = prompt
        input_ids_BT[b, start:end] = completion
        attention_mask_BT[b, :end] = 1
        loss_mask_BT[b, start:end] = mask
    return {
        "input_ids": torch.from_numpy(input_ids_BT),
        "attention_mask": torch.from_numpy(attention_mask_BT),
        "loss_mask": torch.from_numpy(loss_mask_BT),
        "token_index": torch.from_numpy(np.flatnonzero(attention_mask_BT)),
        "scored_index": torch.from_numpy(np.flatnonzero(loss_mask_BT)),
        "label": torch.tensor([row["label"] for row in rows], dtype=torch.bool),
        "weight": torch.tensor([row["weight"] for row in rows], dtype=torch.float64),
        "row": torch.tensor([row["row"] for row in rows], dtype=torch.int64),
    }


def check_pairable(dataset: TokenRows) -> None:
    """Raise DataError for a set of a single row, where a loss needs pairs of different rows."""
    if len(dataset) == 1:
        raise DataError(
            f"{dataset.name}: z_ref is estimated from pairs of different rows; got a set of one row. "
            "Add rows, or pass --loss_type apo_zero_unpaired."
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
            check_pairable(dataset)
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

    def plan(self, lengths_N: IntArray, *, with_gradient: bool) -> Plan:
        """Deal sequences to ranks and micro-batches under the limits; see `plan_micro_batches`."""
        factor = 1 if with_gradient else self.layout.larger_without_gradient
        max_rows = None if self.max_rows is None else factor * self.max_rows
        max_tokens = None if self.max_tokens is None else factor * self.max_tokens * self.layout.shared_by
        return plan_micro_batches(
            lengths_N,
            self.world_size,
            max_rows,
            max_tokens,
            packed=self.layout.packed,
            attention_length=self.layout.attention_length,
            apart_at=self.layout.apart_at,
        )

    def make_batch(self, index_N: IntArray) -> RankBatch:
        """Return this rank's share of a global batch, by the positions of its rows in the data set."""
        data = self.dataset
        rows_N = data.rows[index_N]
        lengths_N = self.pair_lengths(index_N, index_N)
        plan = self.plan(lengths_N, with_gradient=self.shuffle)
        matched = [self._matched(index_N[shares[self.rank]]) for shares in plan]
        desirable = sum(int(m["loss_mask"][m["label"]].sum()) for m in matched)
        lines = [sum(max(1, len(shares[rank])) for shares in plan) for rank in range(self.world_size)]
        batch = RankBatch(
            matched=matched,
            mismatched=[],
            rows=rows_N,
            kl_rows=np.empty(0, dtype=np.int64),
            same_prompt=0,
            same_completion=0,
            desirable_tokens=desirable,
            matched_lines=lines,
            matched_tokens=int(lengths_N.sum()),
            mismatched_tokens=0,
            slots=self._slots(plan, lengths_N),
        )
        if not self.needs_mismatched:
            return batch
        prompts_N, completions_N = data.prompt_keys[index_N], data.completion_keys[index_N]
        partner_N = pair_mismatched(prompts_N, completions_N)
        same_prompt_N = prompts_N == prompts_N[partner_N]
        same_completion_N = (completions_N == completions_N[partner_N]) & ~same_prompt_N
        pair_lengths_N = self.pair_lengths(index_N, index_N[partner_N])
        plan = self.plan(pair_lengths_N, with_gradient=False)
        shares_of_rank = [shares[self.rank] for shares in plan]
        return batch._replace(
            mismatched=[self._mismatched(index_N[share], index_N[partner_N][share]) for share in shares_of_rank],
            kl_rows=rows_N[partner_N],
            same_prompt=int(same_prompt_N.sum()),
            same_completion=int(same_completion_N.sum()),
            mismatched_tokens=int(pair_lengths_N.sum()),
            slots=batch.slots + self._slots(plan, pair_lengths_N),
        )

    def _slots(self, plan: Plan, lengths_N: IntArray) -> int:
        """Return the places for tokens that all ranks' forwards of a plan run through."""
        shares = [lengths_N[share] for shares in plan for share in shares if len(share)]
        sizes = [int(share.sum()) if self.layout.packed else len(share) * int(share.max()) for share in shares]
        sizes += [DUMMY_TOKENS] * (sum(map(len, plan)) - len(shares))
        # Tokens are shared evenly.
        return sum(size + -size % self.layout.shared_by for size in sizes)

    def _matched(self, index: IntArray) -> MicroBatch:
        data = self.dataset
        rows = [data[int(i)] for i in index]
        sequences = [data.cut(r["prompt_ids"], r["completion_ids"], r["completion_mask"]) for r in rows]
        return self._pinned(collate(sequences, rows, self.pad_token_id))

    def _mismatched(self, index: IntArray, partner: IntArray) -> MicroBatch:
        data = self.dataset
        pairs = [(data[int(i)], data[int(j)]) for i, j in zip(index, partner, strict=True)]
        sequences = [data.cut(x["prompt_ids"], y["completion_ids"], y["completion_mask"]) for x, y in pairs]
        batch = self._pinned(collate(sequences, [x for x, _ in pairs], self.pad_token_id))
        return {f"kl_{name}": tensor for name, tensor in batch.items()}

    def _pinned(self, micro_batch: MicroBatch) -> MicroBatch:
        if not self.pin_memory:
            return micro_batch
        return {name: tensor.pin_memory() for name, tensor in micro_batch.items()}
