"""Plans as properties that hold for every size, and what they cost where that matters: on thousands of ranks."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openkto.batches.plan import plan_cost, plan_micro_batches, row_costs

row_lengths = st.lists(st.integers(2, 300), min_size=1, max_size=80).map(np.array)
limits = st.one_of(st.none(), st.integers(300, 1200))


@given(row_lengths, st.integers(1, 9), st.one_of(st.none(), st.integers(1, 8)), limits, st.booleans())
def test_a_plan_runs_every_row_once_within_the_limits(lengths, num_ranks, max_rows, max_tokens, packed):
    plan = plan_micro_batches(lengths, num_ranks, max_rows, max_tokens, packed=packed)
    planned = np.concatenate([share for wave in plan for share in wave])
    assert sorted(planned) == list(range(len(lengths)))
    for wave in plan:
        assert len(wave) == num_ranks
        assert any(len(share) for share in wave)
        for share in wave:
            assert max_rows is None or len(share) <= max_rows
            if max_tokens is not None and len(share):
                tokens = lengths[share].sum() if packed else len(share) * lengths[share].max()
                assert tokens <= max_tokens


def test_a_row_over_the_limit_stands_alone():
    plan = plan_micro_batches(np.array([90, 500, 90]), 1, None, 200, packed=True)
    assert sorted(sorted(share) for wave in plan for share in wave) == [[0, 2], [1]]


def test_a_lone_row_over_the_limit_is_planned_too():
    ((share,),) = plan_micro_batches(np.array([500]), 1, None, 200, packed=True)
    assert share.tolist() == [0]


def test_short_rows_run_beside_a_long_one_where_that_is_cheaper():
    # All evenly: 1000 and 900 in two micro-batches. In turn: 1000 and 900 together, beside short rows.
    lengths = np.array([1000, 900] + [50] * 50)
    plan = plan_micro_batches(lengths, 4, None, 1000, packed=True, attention_length=5000.0)
    cost = row_costs(lengths, 5000.0)
    assert plan_cost([[list(share) for share in wave] for wave in plan], cost) < 1500


def test_what_cannot_be_filled_evenly_takes_no_further_micro_batch():
    lengths = np.array([950, 751, 701, 639, 525, 396, 291, 261, 241, 240, 231, 198, 151, 125, 24])
    assert len(plan_micro_batches(lengths, 3, None, 1000, packed=True, attention_length=5000.0)) == 2


def test_padded_rows_of_one_micro_batch_are_of_similar_length():
    lengths = np.array([10, 1000, 10, 1000, 10, 1000, 10, 1000])
    plan = plan_micro_batches(lengths, 1, 4)
    assert sorted(sorted(lengths[share]) for wave in plan for share in wave) == [[10] * 4, [1000] * 4]


def test_packed_rows_take_the_fewest_micro_batches():
    lengths = np.array([600, 400, 500, 500, 700, 300])
    assert len(plan_micro_batches(lengths, 1, None, 1000, packed=True)) == 3


def test_rows_a_little_over_half_the_limit_are_planned_in_a_second():
    lengths = np.random.default_rng(0).integers(510, 520, 1500)
    start = time.process_time()
    plan = plan_micro_batches(lengths, 1, None, 1000, packed=True)
    assert (
        time.process_time() - start < 2
    )  # one micro-batch more at a time: 4 s, and 16 times as long for 4 times as many
    assert [len(share) for (share,) in plan] == [1] * 1500


def log_normal(num_rows, seed, sigma=0.8, longest=4096):
    return np.random.default_rng(seed).lognormal(6, sigma, num_rows).astype(np.int64).clip(2, longest)


@pytest.mark.parametrize("sigma", [0.5, 0.8, 1.0])
@pytest.mark.parametrize("max_tokens", [8192, 16384])
@pytest.mark.parametrize("attention_length", [6000.0, 50000.0])
def test_1024_ranks_share_8192_rows_within_3_percent_of_the_best_in_under_100_ms(sigma, max_tokens, attention_length):
    seconds = []
    for seed in range(3):
        lengths = log_normal(8192, seed, sigma)
        start = time.process_time()
        plan = plan_micro_batches(lengths, 1024, None, max_tokens, packed=True, attention_length=attention_length)
        seconds.append(time.process_time() - start)
        cost = row_costs(lengths, attention_length)
        best = max(cost.sum() / 1024, cost.max())
        assert plan_cost([[list(share) for share in wave] for wave in plan], cost) <= 1.03 * best
    assert min(seconds) < 0.05  # a step plans twice: matched and mismatched


@pytest.mark.parametrize(("num_rows", "num_ranks"), [(64, 2), (128, 8), (512, 8), (8192, 64)])
def test_ranks_wait_little_where_a_step_has_several_micro_batches(num_rows, num_ranks):
    lengths = log_normal(num_rows, 1)
    plan = plan_micro_batches(lengths, num_ranks, None, 8192, packed=True, attention_length=50000.0)
    cost = row_costs(lengths, 50000.0)
    best = max(cost.sum() / num_ranks, cost.max())
    assert plan_cost([[list(share) for share in wave] for wave in plan], cost) <= 1.03 * best


def test_attention_counts_in_the_balance():
    # A row of 1000 tokens costs as much as four of 250 in the dense layers, and as eight with attention.
    lengths = np.array([1000] + [250] * 12)
    (wave,) = plan_micro_batches(lengths, 2, None, None, packed=True, attention_length=500.0)
    assert sorted(len(share) for share in wave) == [3, 10]  # 3000 + 2 * 375, and 10 * 375
    (wave,) = plan_micro_batches(lengths, 2, None, None, packed=True)
    assert sorted(len(share) for share in wave) == [5, 8]  # 2000 each


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 9000), st.integers(1, 4096), st.integers(0, 2**32 - 1), st.booleans())
def test_thousands_of_ranks_have_the_same_number_of_micro_batches(num_rows, num_ranks, seed, packed):
    plan = plan_micro_batches(log_normal(num_rows, seed), num_ranks, 4, packed=packed)
    assert all(len(wave) == num_ranks for wave in plan)
    assert len(plan) <= 2 * -(-num_rows // (num_ranks * 4))


def test_similar_lengths_run_together():
    lengths = log_normal(256, 0, longest=2048)
    plan = plan_micro_batches(lengths, 8, 4)
    padded = sum(len(share) * lengths[share].max() for wave in plan for share in wave if len(share))
    assert lengths.sum() / padded > 0.95
