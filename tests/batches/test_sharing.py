"""Prompts that run once: which pairs share them, on which rank, and how such a micro-batch is laid out."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from openkto.batches.loader import KTODataLoader, Layout
from openkto.batches.micro_batch import collate
from openkto.batches.plan import plan_micro_batches
from openkto.batches.sharing import plan_shared
from tests.tiny import token_rows

pairs = st.lists(st.tuples(st.integers(0, 6), st.integers(1, 40)), min_size=1, max_size=60)


def lengths_of(found):
    """Return (lengths, prompts' lengths, keys) of pairs given by (prompt, completion's tokens)."""
    keys = np.array([key for key, _ in found])
    prompts = 10 * keys  # that of prompt 0 cannot be shared
    return prompts + np.array([tokens for _, tokens in found]) + (keys == 0), prompts, keys


@given(
    pairs,
    st.integers(1, 5),
    st.one_of(st.none(), st.integers(1, 8)),
    st.one_of(st.none(), st.integers(110, 400)),
    st.booleans(),
)
def test_a_plan_runs_every_pair_once_within_the_limits_and_a_prompt_before_what_reuses_it(
    found, num_ranks, max_rows, max_tokens, with_gradient
):
    lengths, prompts, keys = lengths_of(found)
    planned = plan_shared(
        lengths, prompts, keys, num_ranks, max_rows, max_tokens, attention_length=300.0, with_gradient=with_gradient
    )
    limited = lengths if with_gradient else planned.run_P
    shares = [share for wave in planned.plan for share in wave]
    assert sorted(np.concatenate(shares)) == list(range(len(found)))
    assert all(len(wave) == num_ranks for wave in planned.plan)
    assert (planned.run_P == lengths - planned.reused_P).all()
    for share in shares:
        assert max_rows is None or len(share) <= max_rows
        assert max_tokens is None or limited[share].sum() <= max_tokens
        owner = None
        for pair in share:
            if planned.reused_P[pair]:
                assert owner is not None
                assert keys[pair] == keys[owner] != 0
                assert planned.reused_P[pair] == prompts[pair]
            else:
                owner = pair


def test_each_prompt_of_a_batch_runs_once_on_one_rank():
    lengths, prompts, keys = lengths_of([(5, 3), (4, 3), (5, 2), (4, 1)])
    planned = plan_shared(lengths, prompts, keys, 1)
    assert planned.run_P.sum() == 50 + 40 + 3 + 3 + 2 + 1
    assert sorted(planned.reused_P) == [0, 0, 40, 50]


def test_one_prompts_completions_are_spread_over_the_ranks_where_that_is_faster():
    lengths, prompts, keys = lengths_of([(1, 30)] * 16)
    planned = plan_shared(lengths, prompts, keys, 8)
    assert [len(share) for share in planned.plan[0]] == [2] * 8
    assert planned.run_P.sum() == 8 * 10 + 16 * 30


def test_a_shared_micro_batch_has_each_prompt_once_and_says_where_it_stands():
    sequences = [([7, 8], [1], [True]), ([7, 8], [2, 3], [True, False]), ([9], [4], [True])]
    rows = [{"label": True, "weight": 1.0, "row": row} for row in range(3)]
    batch = collate(sequences, rows, 0, np.array([0, 2, 0]))
    assert batch["input_ids"].flatten()[batch["token_index"]].tolist() == [7, 8, 1, 2, 3, 9, 4]
    assert (batch["token_index"] % 4).tolist() == [0, 1, 2, 2, 3, 0, 1]  # the positions go on after the prompt
    assert batch["place_index"].tolist() == [0, 1, 2, 0, 1, 3, 4, 5, 6]
    assert batch["query_bounds"].tolist() == [0, 3, 5, 7]
    assert "place_index" not in collate(sequences, rows, 0, np.zeros(3, dtype=np.int64))


def test_prompts_that_differ_are_never_shared():
    rows = [{"label": True, "weight": 1.0, "row": row} for row in range(2)]
    with pytest.raises(AssertionError, match="only whole and equal prompts are shared"):
        collate([([7, 8], [1], [True]), ([7, 9], [2], [True])], rows, 0, np.array([0, 2]))


@given(st.lists(st.integers(1, 90), min_size=1, max_size=60), st.integers(1, 4), st.sampled_from([None, 100, 400]))
def test_rows_that_share_no_prompt_are_planned_as_without_sharing(completions, num_ranks, max_tokens):
    lengths, prompts, keys = lengths_of(list(enumerate(completions, start=1)))
    limits = num_ranks, 8, max_tokens
    planned = plan_shared(lengths, prompts, keys, *limits, attention_length=300.0, with_gradient=True)
    alone = plan_micro_batches(lengths, *limits, packed=True, attention_length=300.0)
    assert [[share.tolist() for share in wave] for wave in planned.plan] == [
        [share.tolist() for share in wave] for wave in alone
    ]


def make_batches(rows, world_size=1, shares_matched=False, **more):
    """Return each rank's share of the whole set as one batch that trains."""
    found = []
    for rank in range(world_size):
        loader = KTODataLoader(rows, len(rows), 4, rank=rank, world_size=world_size, **more)
        loader.layout = Layout(packed=True, shares_prompts=True, shares_pairs=True, shares_matched=shares_matched)
        found.append(next(iter(loader)))
    return found


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_step_lays_out_all_its_pairs_by_prompt_and_counts_what_runs(world_size):
    rows = token_rows([True, False] * 6, answers=2)
    shares = make_batches(rows, world_size)
    tokens = {"matched": 0, "mismatched": 0, "shared": 0}
    places = []
    for share in shares:
        for name, prefix in (("matched", ""), ("mismatched", "kl_"), ("shared", "")):
            tokens[name] += sum(len(m[f"{prefix}token_index"]) for m in getattr(share, name))
        places += [int(place) for m in share.shared for place in m["place"] if place >= 0]
        assert len(share.shared) == len(shares[0].shared)
        assert not any("place_index" in m for m in share.matched)  # with gradient each row has its own prompt here
    assert sorted(places) == list(range(24))
    assert shares[0].slots == tokens["matched"] + tokens["mismatched"]
    once = int(rows.prompt_lengths[::2].sum()) + 2 * int(rows.completion_lengths.sum())
    if world_size == 1:
        assert tokens["shared"] == once
        assert tokens["mismatched"] == shares[0].mismatched_tokens == once - int(rows.completion_lengths.sum())
    assert tokens["shared"] < int(rows.prompt_lengths.sum()) * 2 + 2 * int(rows.completion_lengths.sum())


@pytest.mark.parametrize("truncation", ["completion", "prompt"])
def test_matched_rows_run_their_prompt_once_too_and_the_pairs_after_it_find_it(truncation):
    rows = token_rows([True, False] * 6, answers=2)
    (apart,), (batch,) = make_batches(rows), make_batches(rows, shares_matched=True)
    ran, whole = (sum(len(m["token_index"]) for m in one.matched) for one in (batch, apart))
    assert ran == int(rows.prompt_lengths[::2].sum() + rows.completion_lengths.sum()) < whole
    assert batch.matched_tokens == apart.matched_tokens == whole
    assert batch.slots == apart.slots - (whole - ran)
    rows.truncation = truncation  # nothing is so long as to be cut
    loader = KTODataLoader(rows, len(rows), 4)
    loader.layout = Layout(packed=True, shares_prompts=True, shares_matched=True, held_tokens=10_000)
    batch = next(iter(loader))
    assert batch.reuses_prompts
    assert batch.mismatched_tokens == int(rows.completion_lengths.sum()) + len(rows)
    for matched, pairs in zip(batch.matched, batch.mismatched, strict=True):
        ids = torch.cat(
            [
                pairs["kl_input_ids"].flatten()[pairs["kl_rest_index"]],
                matched["input_ids"].flatten()[matched["token_index"]],
            ]
        )
        seen = pairs["kl_attention_mask"] == 1
        assert torch.equal(ids[pairs["kl_rest_places"]], pairs["kl_input_ids"][seen])


def test_a_prompt_that_a_completion_cuts_is_its_own():
    rows = token_rows([True, False] * 4, answers=2)
    rows.truncation, rows.max_len = "prompt", 1 + int((rows.prompt_lengths + rows.completion_lengths).min())
    (batch,) = make_batches(rows)
    found = [m["token_index"] for m in batch.shared]
    assert sum(map(len, found)) <= sum(int(m["attention_mask"].sum()) for m in batch.shared)
    rows.truncation = "completion"
    (batch,) = make_batches(rows)
    assert sum(len(m["token_index"]) for m in batch.shared) < sum(map(len, found))
