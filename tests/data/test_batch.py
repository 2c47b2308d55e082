"""Order and pairing as properties that hold for every size."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from openkto.data.batch import batch_bounds, epoch_order, pair_mismatched

prompt_keys = st.lists(st.integers(0, 6), min_size=1, max_size=40).map(np.array)


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
