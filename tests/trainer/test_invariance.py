"""The first promise: ranks, micro-batches and ZeRO stages change nothing that a step computes."""

import json
from itertools import chain

import numpy as np
import pytest

from tests.helpers.definition import assert_is_definition
from tests.helpers.records import batches as read_batches
from tests.helpers.records import lines as read_lines
from tests.helpers.runs import BETA, LR, MIXED, SEED, WEIGHTS, assert_same, train
from tests.ranks import run_ranks
from tests.tiny import Oracle, tiny_llama, token_rows


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    (lines, weights) = run_ranks(train, 1, folder, MIXED, folder, timeout=60)[0]
    return lines, weights, folder


def test_one_rank_equals_the_definition_in_float64(one_rank):
    lines, weights, folder = one_rank
    oracle = Oracle(tiny_llama(), beta=BETA, weights=WEIGHTS, lr=LR)
    assert len(assert_is_definition(folder, (lines, weights), token_rows(MIXED, SEED), oracle)) == 5


def read_rewards(folder):
    """Return each step's rewards by row, and which of its rows are desirable."""
    lines = [json.loads(line) for line in (folder / "rewards.jsonl").read_text().splitlines()]
    rewards = [dict(zip(line["rows"], line["rewards"], strict=True)) for line in lines]
    return rewards, [dict(zip(line["rows"], line["desirable"], strict=True)) for line in lines]


def test_the_rewards_that_are_written_are_those_of_the_steps_own_rows(one_rank):
    lines, _, folder = one_rank
    batches = [batch["rows"] for batch in read_batches(folder)]
    rewards, labels = read_rewards(folder)
    assert [set(step) for step in rewards] == [set(rows) for rows in batches]
    for line, step, label in zip(lines, rewards, labels, strict=True):
        for metric, is_desirable in (("rewards/chosen", 1), ("rewards/rejected", 0)):
            of_class = [reward for row, reward in step.items() if label[row] == is_desirable]
            assert (metric in line) == bool(of_class)
            if of_class:
                assert line[metric] == pytest.approx(sum(of_class) / len(of_class), rel=1e-3, abs=1e-7)


@pytest.mark.parametrize(
    ("world_size", "zero_stage"),
    [
        *(pytest.param(1, n, marks=pytest.mark.slow) for n in range(4)),
        *(pytest.param(2, n, marks=pytest.mark.slow) for n in (0, 1)),
        (2, 2),
        (2, 3),
    ],
)
def test_ranks_micro_batches_and_stages_change_nothing(one_rank, zero_stage, world_size, tmp_path):
    lines, weights, folder = one_rank
    # One row a micro-batch: two ranks accumulate the gradients of two, where the run to compare with has all in one.
    others = run_ranks(train, world_size, tmp_path, MIXED, tmp_path, zero_stage, 4, 1)[0]
    assert_same((lines, weights), others)
    for step, other in zip(read_rewards(folder)[0], read_rewards(tmp_path)[0], strict=True):
        assert other == pytest.approx(step, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("zero_stage", [pytest.param(0, marks=pytest.mark.slow), 2, 3])
def test_ranks_of_one_class_and_ranks_without_a_row_change_nothing(zero_stage, tmp_path):
    labels = [True, False, True, False, True]  # batches of 2 and 3 over 3 ranks: some rank has no row, most one class
    one = run_ranks(train, 1, tmp_path, labels, tmp_path / "a", 0, 2, 2, 4)[0]
    assert_same(one, run_ranks(train, 3, tmp_path, labels, tmp_path / "b", zero_stage, 2, 1, 4)[0])


def test_a_class_nobody_saw_has_no_metric(tmp_path):
    (lines, _) = run_ranks(train, 2, tmp_path, [True] * 6, tmp_path, 1)[0]
    for line in lines:
        assert not {"rewards/rejected", "logps/rejected", "rewards/margins", "rewards/auc"} & line.keys()
        assert np.isfinite(list(v for v in line.values() if isinstance(v, float))).all()


def test_two_epochs_use_every_row_once_each(tmp_path):
    run_ranks(train, 2, tmp_path, MIXED, tmp_path, 2, 4, 1, 6)
    batches = [batch["rows"] for batch in read_batches(tmp_path)]
    assert sorted(chain(*batches[:3])) == sorted(chain(*batches[3:])) == list(range(11))
    assert batches[:3] != batches[3:]
    lines = read_lines(tmp_path)
    assert [line["consumed_samples"] for line in lines] == [4, 8, 11, 15, 19, 22]
    assert lines[-1]["epoch"] == 2.0
