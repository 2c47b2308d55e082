"""Order, pairing and plan as properties that hold for every size, also for thousands of ranks."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openkto.data.batch import batch_bounds, epoch_order, pair_mismatched, plan_micro_batches

prompt_keys = st.lists(st.integers(0, 6), min_size=1, max_size=40).map(np.array)
row_lengths = st.lists(st.integers(2, 300), min_size=1, max_size=80).map(np.array)


def test_the_order_is_a_function_of_seed_and_epoch_alone():
    assert epoch_order(6, seed=42, epoch=0).tolist() == epoch_order(6, seed=42, epoch=0).tolist()
    orders = {tuple(epoch_order(20, seed, epoch)) for seed in (1, 2) for epoch in (0, 1, 2)}
    assert len(orders) == 6
    assert sorted(epoch_order(1000, 3, 4)) == list(range(1000))


def test_the_order_stays_the_same_between_versions():
    assert epoch_order(8, seed=42, epoch=1).tolist() == [0, 4, 6, 1, 2, 7, 3, 5]


@given(st.integers(1, 500), st.integers(1, 60))
def test_batches_hold_every_row_once_and_none_is_small(num_rows, batch_size):
    bounds = batch_bounds(num_rows, batch_size)
    sizes = np.diff(bounds)
    assert bounds[0] == 0
    assert bounds[-1] == num_rows
    assert (sizes[:-1] == batch_size).all()
    assert sizes[-1] <= 1.5 * batch_size
    assert len(sizes) == 1 or 2 * sizes[-1] >= batch_size
    assert batch_size == 1 or num_rows == 1 or sizes[-1] > 1


@pytest.mark.parametrize(("rows", "batch", "sizes"), [(10, 4, [4, 4, 2]), (9, 4, [4, 5]), (3, 8, [3]), (5, 2, [2, 3])])
def test_a_last_batch_under_half_joins_the_one_before(rows, batch, sizes):
    assert np.diff(batch_bounds(rows, batch)).tolist() == sizes


def test_distinct_prompts_are_paired_by_rotation():
    assert pair_mismatched(np.array([10, 11, 12, 13])).tolist() == [3, 0, 1, 2]


@given(prompt_keys)
def test_pairing_is_a_permutation_with_the_fewest_collisions_possible(keys):
    partner = pair_mismatched(keys)
    assert sorted(partner) == list(range(len(keys)))
    largest = max(Counter(keys.tolist()).values())
    assert int((keys == keys[partner]).sum()) == max(0, 2 * largest - len(keys))


def test_flattened_pairs_never_get_the_other_answer_to_their_prompt():
    keys = np.repeat(np.arange(4), 2)
    assert (keys != keys[pair_mismatched(keys)]).all()


@given(row_lengths, st.integers(1, 9), st.integers(1, 8), st.one_of(st.none(), st.integers(300, 1200)))
def test_a_plan_runs_every_row_once_within_the_limits(lengths, num_ranks, max_rows, max_tokens):
    plan = plan_micro_batches(lengths, num_ranks, max_rows, max_tokens)
    planned = np.concatenate([share for wave in plan for share in wave])
    assert sorted(planned) == list(range(len(lengths)))
    for wave in plan:
        assert len(wave) == num_ranks
        assert any(len(share) for share in wave)
        for share in wave:
            assert len(share) <= max_rows
            if max_tokens is not None and len(share):
                assert len(share) * lengths[share].max() <= max_tokens


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 9000), st.integers(1, 4096), st.integers(0, 2**32 - 1))
def test_thousands_of_ranks_share_a_batch_evenly(num_rows, num_ranks, seed):
    lengths = np.random.default_rng(seed).lognormal(6, 0.8, num_rows).astype(np.int64).clip(2, 4096)
    plan = plan_micro_batches(lengths, num_ranks, 4)
    for wave in plan:
        sizes = [len(share) for share in wave]
        assert max(sizes) - min(sizes) <= 1
    assert len(plan) == -(-num_rows // (num_ranks * 4))


def test_similar_lengths_run_together():
    lengths = np.random.default_rng(0).lognormal(6, 0.8, 256).astype(np.int64).clip(2, 2048)
    plan = plan_micro_batches(lengths, 8, 4)
    padded = sum(len(share) * lengths[share].max() for wave in plan for share in wave)
    assert lengths.sum() / padded > 0.93
