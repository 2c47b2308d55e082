"""Token sequences as the tensors of one forward, with prompts that several of them share laid only once.

Shapes:  B = rows in a micro-batch, T = its longest row, A = the tokens of all its rows, P = those that run, K = the
         scored ones.
"""

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from openkto.batches.batch import IntArray

MicroBatch = dict[str, Tensor]
Sequence = tuple[list[int], list[int], list[bool]]  # prompt ids, completion ids, which of those are scored

DUMMY_TOKENS = 2
# What a forward takes of pairs whose prompts have run before, in the place of what it takes of whole ones.
REST = {"token_index": "rest_index", "place_index": "rest_places", "query_bounds": "rest_bounds"}


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

    @property
    def truncation(self) -> str: ...

    def __len__(self) -> int: ...

    def __getitem__(self, i: int) -> dict: ...

    def cut(
        self, prompt_ids: list[int], completion_ids: list[int], completion_mask: list[bool]
    ) -> tuple[list[int], list[int], list[bool]]: ...

    def cut_lengths(self, prompt_lengths: NDArray, completion_lengths: NDArray) -> NDArray: ...


def read_pairs(data: TokenRows, pairs_P2: IntArray) -> tuple[list[Sequence], list[dict]]:
    """Return pairs' tokens after the cut, by whose prompt and whose completion they have, and the prompts' rows.

    Each row is read once.
    """
    row_of = {i: data[i] for i in dict.fromkeys(pairs_P2.ravel().tolist())}
    pairs = [(row_of[i], row_of[j]) for i, j in pairs_P2.tolist()]
    cut = [data.cut(x["prompt_ids"], y["completion_ids"], y["completion_mask"]) for x, y in pairs]
    return cut, [x for x, _ in pairs]


def cut_pairs(data: TokenRows, pairs_P2: IntArray) -> list[Sequence]:
    """Return pairs' tokens after the cut, by whose prompt and whose completion they have."""
    return read_pairs(data, pairs_P2)[0]


def collate(
    sequences: list[Sequence], rows: list[dict], pad_token_id: int, reused_B: IntArray | None = None
) -> MicroBatch:
    """Pad sequences into one micro-batch; none at all gives a dummy row.

    Args:
        rows: where each one's label, weight and row number stand.
        reused_B: [B], the tokens that each sequence has from the newest one before it with a 0 here, which are the
            prompt of both: they run only there.
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
    batch = {
        "input_ids": torch.from_numpy(input_ids_BT),
        "attention_mask": torch.from_numpy(attention_mask_BT),
        "loss_mask": torch.from_numpy(loss_mask_BT),
        "token_index": torch.from_numpy(np.flatnonzero(attention_mask_BT)),
        "scored_index": torch.from_numpy(np.flatnonzero(loss_mask_BT)),
        "label": torch.tensor([row["label"] for row in rows], dtype=torch.bool),
        "weight": torch.tensor([row["weight"] for row in rows], dtype=torch.float64),
        "row": torch.tensor([row["row"] for row in rows], dtype=torch.int64),
    }
    if reused_B is not None and reused_B.any():
        assert all(
            prompt == sequences[owner][0] and len(prompt) == reused
            for (prompt, _, _), owner, reused in zip(sequences, owners(reused_B), reused_B, strict=True)
            if reused
        ), "only whole and equal prompts are shared"
        batch |= _shared(attention_mask_BT, reused_B)
    return batch


def owners(reused_B: IntArray) -> IntArray:
    """Return the row in which the tokens that each row reuses stand, [B]; its own place where it reuses none."""
    return np.maximum.accumulate(np.where(reused_B == 0, np.arange(len(reused_B)), 0))


def _shared(attention_mask_BT: NDArray[np.int64], reused_B: IntArray) -> MicroBatch:
    """Return what a packed forward needs that runs shared prompts once, in the place of the ordinary `token_index`.

    `token_index` [P] leaves the reused tokens out, `query_bounds` [B + 1] are the bounds of what is left of each row,
    and `place_index` [A] says where each token of the whole rows stands among those that run.
    """
    runs_BT, place_BT = _running(attention_mask_BT, reused_B)
    # A reused token is in the same column of its owner's row.
    return _layout(attention_mask_BT, runs_BT, np.where(runs_BT, place_BT, place_BT[owners(reused_B)]))


def after_prompts(pairs: MicroBatch, matched: MicroBatch, reused_B: IntArray) -> MicroBatch:
    """Return what a packed forward needs that runs pairs only from a token of their prompts on, after matched rows.

    The tokens before have run in the rows of `matched`, of which each has the prompt of the pair in its place. As in
    `_shared`, and with names of their own, since a model that has not run those rows needs the pairs whole; the places
    in `rest_places` [A] count the tokens of the matched rows behind those that run.

    Args:
        reused_B: [B], how many of each pair's first tokens have run.
    """
    mask_BT, before_BT = pairs["attention_mask"].numpy(), matched["attention_mask"].numpy()
    column_T = np.arange(mask_BT.shape[1])
    both = min(mask_BT.shape[1], before_BT.shape[1])
    is_same_BT = (pairs["input_ids"][:, :both] == matched["input_ids"][:, :both]).numpy()
    assert (is_same_BT | (column_T[:both] >= reused_B[:, None])).all(), "only equal prompts are reused"
    runs_BT, place_BT = _running(mask_BT, reused_B)
    tokens_B = before_BT.sum(1)
    whole_BT = (tokens_B.cumsum() - tokens_B)[:, None] + np.minimum(column_T, tokens_B[:, None] - 1)
    earlier_BT = whole_BT if "place_index" not in matched else matched["place_index"].numpy()[whole_BT]
    layout = _layout(mask_BT, runs_BT, np.where(runs_BT, place_BT, runs_BT.sum() + earlier_BT))
    return {REST[name]: tensor for name, tensor in layout.items()}


def _running(attention_mask_BT: NDArray[np.int64], reused_B: IntArray) -> tuple[NDArray[np.bool_], IntArray]:
    """Return which tokens run, [B, T], and the place of each that does among them, [B, T]."""
    runs_BT = (attention_mask_BT == 1) & (np.arange(attention_mask_BT.shape[1]) >= reused_B[:, None])
    return runs_BT, (runs_BT.cumsum() - 1).reshape(runs_BT.shape)


def _layout(attention_mask_BT: NDArray[np.int64], runs_BT: NDArray[np.bool_], place_BT: IntArray) -> MicroBatch:
    return {
        "token_index": torch.from_numpy(np.flatnonzero(runs_BT)),
        "place_index": torch.from_numpy(place_BT[attention_mask_BT == 1]),
        "query_bounds": torch.from_numpy(np.concatenate([[0], runs_BT.sum(1).cumsum()]).astype(np.int32)),
    }
