"""Order and pairing as properties that hold for every size."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from openkto.batches.batch import batch_bounds, epoch_order


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
