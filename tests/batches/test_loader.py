"""What the loader yields: both kinds of micro-batches, dummies, and the place to go on from."""

import threading

import numpy as np
import pytest
import torch

from openkto.batches.loader import KTODataLoader
from openkto.batches.micro_batch import collate
from openkto.errors import ConfigError, DataError
from tests.tiny import TokenRowList, token_rows


def scored_tokens(micro_batches, prefix=""):
    """Return {row: (prompt ids, completion ids)} of a rank's micro-batches."""
    found = {}
    for m in micro_batches:
        for ids, attention, mask, row in zip(
            *(m[prefix + name] for name in ("input_ids", "attention_mask", "loss_mask", "row")), strict=True
        ):
            real = ids[attention.bool()].tolist()
            first = int(mask.nonzero()[0]) if mask.any() else len(real)
            found[int(row)] = (real[:first], real[first:])
    found.pop(-1, None)
    return found


def test_padding_is_on_the_right_and_masks_come_from_lengths_not_ids():
    rows = [{"label": True, "weight": 0.5, "row": 3}, {"label": False, "weight": 2.0, "row": 4}]
    batch = collate([([5, 0], [0, 7], [True, True]), ([5], [6], [True])], rows, pad_token_id=0)
    assert batch["input_ids"].tolist() == [[5, 0, 0, 7], [5, 6, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert batch["loss_mask"].tolist() == [[False, False, True, True], [False, True, False, False]]
    assert batch["label"].tolist() == [True, False]
    assert batch["weight"].tolist() == [0.5, 2.0]


def test_an_empty_share_is_a_dummy_that_scores_nothing():
    batch = collate([], [], pad_token_id=0)
    assert not batch["loss_mask"].any()
    assert batch["row"].tolist() == [-1]


@pytest.mark.parametrize("world_size", [1, 3, 16])
def test_every_rank_has_as_many_micro_batches_and_together_all_rows(world_size):
    rows = token_rows([True] * 11)
    loaders = [KTODataLoader(rows, 4, 2, rank=r, world_size=world_size, seed=1) for r in range(world_size)]
    for shares in zip(*loaders, strict=True):
        assert len({len(s.matched) for s in shares}) == len({len(s.mismatched) for s in shares}) == 1
        together = {}
        for share in shares:
            together |= scored_tokens(share.matched)
        assert sorted(together) == sorted(shares[0].rows)
        lines = [sum(len(m["row"]) for m in share.matched) for share in shares]
        assert all(share.matched_lines == lines for share in shares)
        sizes = [m["input_ids"].numel() for share in shares for m in share.matched]
        sizes += [m["kl_input_ids"].numel() for share in shares for m in share.mismatched]
        assert all(share.slots == sum(sizes) for share in shares)
        tokens = sum(len(prompt) + len(completion) for prompt, completion in together.values())
        assert all(share.matched_tokens == tokens for share in shares)


@pytest.mark.parametrize("packed", [True, False])
def test_micro_batches_that_keep_nothing_for_backward_are_four_times_as_large(packed):
    rows = token_rows([True] * 16)
    for limits in ({"micro_train_batch_size": 2}, {"max_tokens_per_micro_batch": 22}, {}):
        (batch,) = KTODataLoader(rows, 16, packed=packed, larger_without_gradient=4, **limits)
        (evaluation,) = KTODataLoader(rows, None, packed=packed, larger_without_gradient=4, **limits)
        for micro_batches, prefix, factor in (
            (batch.matched, "", 1), (batch.mismatched, "kl_", 4), (evaluation.matched, "", 4),
        ):  # fmt: skip
            number = [len(m[f"{prefix}row"]) for m in micro_batches]
            tokens = [m[f"{prefix}attention_mask"] for m in micro_batches]
            tokens = [int(mask.sum()) if packed else mask.numel() for mask in tokens]
            most_rows = limits.get("micro_train_batch_size", 16 if "max_tokens_per_micro_batch" in limits else 8)
            assert max(number) <= factor * most_rows
            if "max_tokens_per_micro_batch" in limits:
                assert max(tokens) <= factor * 22
            if factor == 4:
                assert max(number) > most_rows or max(tokens) > 22


def test_ranks_that_share_tokens_take_as_many_more():
    rows = token_rows([True] * 16)
    (batch,) = KTODataLoader(rows, 16, packed=True, max_tokens_per_micro_batch=22, shared_by=2)
    assert 22 < max(int(m["attention_mask"].sum()) for m in batch.matched) <= 44


def test_a_mismatched_pair_is_the_prompt_with_the_partners_very_completion():
    rows = token_rows([True, False] * 4)
    for batch in KTODataLoader(rows, 4, 3, seed=7):
        pairs = scored_tokens(batch.mismatched, "kl_")
        assert sorted(batch.kl_rows) == sorted(batch.rows)
        for row, partner in zip(batch.rows, batch.kl_rows, strict=True):
            assert row != partner
            assert pairs[row] == (rows[row]["prompt_ids"], rows[partner]["completion_ids"])


def test_mismatched_pairs_are_cut_by_the_matched_rows_rule():
    items = [
        {
            "row": i,
            "prompt_ids": [9] * p,
            "completion_ids": [5] * c,
            "completion_mask": [True] * c,
            "label": True,
            "weight": 1.0,
        }
        for i, (p, c) in enumerate([(6, 3), (2, 30)])
    ]
    rows = TokenRowList(items, np.arange(2), max_len=10)
    (batch,) = KTODataLoader(rows, 2, 2)
    assert scored_tokens(batch.matched) == {0: ([9] * 6, [5] * 3), 1: ([9] * 2, [5] * 8)}
    assert scored_tokens(batch.mismatched, "kl_") == {0: ([9] * 6, [5] * 4), 1: ([9] * 2, [5] * 3)}


def test_pairs_of_one_prompt_are_counted_and_none_is_with_itself():
    rows = token_rows([True, False, True])
    rows.prompt_keys[:] = 7
    (batch,) = KTODataLoader(rows, None, 3)
    assert (batch.same_prompt, batch.same_completion) == (3, 0)
    assert (batch.rows != batch.kl_rows).all()


def test_equal_completions_under_different_prompts_are_counted():
    rows = token_rows([True, False, True])
    for name in ("completion_ids", "completion_mask"):
        rows.items[1][name] = rows.items[0][name]
    rows.completion_lengths[1] = rows.completion_lengths[0]
    (batch,) = KTODataLoader(TokenRowList(rows.items, rows.prompt_keys), None, 3)
    assert (batch.same_prompt, batch.same_completion) == (0, 1)


def test_evaluation_takes_the_whole_set_in_file_order_as_one_batch():
    (batch,) = KTODataLoader(token_rows([True] * 9), None, 2)
    assert batch.rows.tolist() == list(range(9))


def test_a_loader_resumes_after_consumed_samples():
    rows = token_rows([True] * 11)
    whole = [b.rows.tolist() for epoch in range(2) for b in _epoch(KTODataLoader(rows, 4, 4, seed=5), epoch)]
    loader = KTODataLoader(rows, 4, 4, seed=5)
    assert loader.start_at(15) == 4
    assert [b.rows.tolist() for b in loader] == whole[4:]


def _epoch(loader, epoch):
    loader.epoch = epoch
    return list(loader)


def test_consumed_samples_between_two_steps_are_refused():
    with pytest.raises(ConfigError, match=r"after a whole step; got 5. The nearest below is 4"):
        KTODataLoader(token_rows([True] * 11), 4, 4).start_at(5)


def test_one_row_cannot_be_paired():
    with pytest.raises(DataError, match="rows: z_ref is estimated from pairs of different rows; got a set of one row"):
        KTODataLoader(token_rows([True]), None, 1)
    (batch,) = KTODataLoader(token_rows([True]), None, 1, needs_mismatched=False)
    assert batch.mismatched == []


def test_the_dtypes_are_those_that_a_model_takes():
    (batch,) = KTODataLoader(token_rows([True, False]), None, 2)
    dtypes = {name: t.dtype for name, t in batch.matched[0].items()}
    assert dtypes == {
        "input_ids": torch.int64, "attention_mask": torch.int64, "loss_mask": torch.bool,
        "label": torch.bool, "weight": torch.float64, "row": torch.int64,
        "token_index": torch.int64, "scored_index": torch.int64,
    }  # fmt: skip


class Broken(TokenRowList):
    """Rows of which one cannot be read."""

    def __getitem__(self, i):
        if i == 7:
            raise DataError("rows.jsonl:8: cannot be read. Fix it.")
        return super().__getitem__(i)


def test_what_the_worker_finds_wrong_is_raised_where_the_batch_is_asked_for():
    rows = token_rows([True] * 12)
    loader = KTODataLoader(Broken(rows.items, rows.prompt_keys), 4, 2, seed=3)
    batches = iter(loader)
    for _ in range(loader.order(0).tolist().index(7) // 4):
        next(batches)
    with pytest.raises(DataError, match=r"rows.jsonl:8: cannot be read\. Fix it"):
        next(batches)
    assert workers() == []


def test_no_worker_is_left_where_a_run_stops_early():
    loader = KTODataLoader(token_rows([True] * 12), 4, 2)
    for _ in loader:
        assert len(workers()) == 1
        break
    assert workers() == []


def workers():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("batches")]
