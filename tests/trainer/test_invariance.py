"""The first promise: ranks, micro-batches and ZeRO stages change nothing that a step computes."""

import json
from itertools import chain

import numpy as np
import pytest
import torch

from openkto.distributed.gather import gather_weights
from tests.ranks import run_ranks
from tests.tiny import Oracle, make_trainer, quiet_args, tiny_llama, token_rows

MIXED = [True, False, True, True, False, False, True, False, True, False, False]
SEED = 3
LR, BETA, WEIGHTS = 3e-4, 0.3, (1.3, 0.7)
NAMES = ("loss", "kl", "kl_unclamped", "grad_norm", "rewards/chosen", "rewards/rejected", "logps/chosen", "num_tokens")


def train(labels, folder, zero_stage=0, batch=4, micro=4, steps=5, **more):
    """Train on these rows; return (metrics lines, final weights), the same on every rank."""
    more = {"desirable_weight": WEIGHTS[0], "undesirable_weight": WEIGHTS[1]} | more
    trainer, strategy = make_trainer(
        token_rows(labels, SEED), zero_stage=zero_stage, batch=batch, micro=micro, lr=LR, beta=BETA, steps=steps, **more
    )
    trainer.fit(quiet_args(folder, steps, log_batches=True))
    weights = gather_weights(trainer.model.module.model, torch.float32)
    if strategy.rank != 0:
        return None
    return read_lines(folder / "metrics.jsonl", "train"), weights


def read_lines(path, kind):
    return [line for line in map(json.loads, path.read_text().splitlines()) if line["kind"] == kind]


def replay(labels, folder, steps, **settings):
    """Train the oracle on the rows and pairs that a run wrote down."""
    items = {item["row"]: item for item in token_rows(labels, SEED).items}
    settings = {"beta": BETA, "weights": WEIGHTS, "lr": LR} | settings
    oracle = Oracle(tiny_llama(), **settings)
    batches = [json.loads(line) for line in (folder / "batches.jsonl").read_text().splitlines()]
    assert len(batches) == steps
    return [oracle.step([items[r] for r in b["rows"]], [items[r] for r in b["kl_rows"]]) for b in batches], oracle


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    (lines, weights) = run_ranks(train, 1, folder, MIXED, folder, timeout=60)[0]
    return lines, weights, folder


def test_one_rank_equals_the_definition_in_float64(one_rank):
    lines, weights, folder = one_rank
    steps, oracle = replay(MIXED, folder, 5)
    for line, expected in zip(lines, steps, strict=True):
        assert line["loss"] == pytest.approx(expected.loss, rel=1e-5)
        assert line["kl"] == pytest.approx(expected.z_ref, rel=1e-4, abs=1e-5)
        assert line["grad_norm"] == pytest.approx(expected.grad_norm, rel=1e-4)
    for name, value in oracle.policy.state_dict().items():
        torch.testing.assert_close(
            weights[name].double(), value, rtol=0, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


def read_rewards(folder):
    """Return each step's rewards by row, and which of its rows are desirable."""
    lines = [json.loads(line) for line in (folder / "rewards.jsonl").read_text().splitlines()]
    rewards = [dict(zip(line["rows"], line["rewards"], strict=True)) for line in lines]
    return rewards, [dict(zip(line["rows"], line["desirable"], strict=True)) for line in lines]


def test_the_rewards_that_are_written_are_those_of_the_steps_own_rows(one_rank):
    lines, _, folder = one_rank
    batches = [json.loads(line)["rows"] for line in (folder / "batches.jsonl").read_text().splitlines()]
    rewards, labels = read_rewards(folder)
    assert [set(step) for step in rewards] == [set(rows) for rows in batches]
    for line, step, label in zip(lines, rewards, labels, strict=True):
        for metric, is_desirable in (("rewards/chosen", 1), ("rewards/rejected", 0)):
            of_class = [reward for row, reward in step.items() if label[row] == is_desirable]
            assert (metric in line) == bool(of_class)
            if of_class:
                assert line[metric] == pytest.approx(sum(of_class) / len(of_class), rel=1e-3, abs=1e-7)


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 2])
def test_ranks_micro_batches_and_stages_change_nothing(one_rank, zero_stage, world_size, tmp_path):
    lines, weights, folder = one_rank
    micro = 1 if world_size == 1 else 2
    (others, other_weights) = run_ranks(train, world_size, tmp_path, MIXED, tmp_path, zero_stage, 4, micro)[0]
    assert_same(lines, weights, others, other_weights)
    for step, other in zip(read_rewards(folder)[0], read_rewards(tmp_path)[0], strict=True):
        assert other == pytest.approx(step, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_ranks_of_one_class_and_ranks_without_a_row_change_nothing(zero_stage, tmp_path):
    labels = [True, False, True, False, True]  # batches of 2 and 3 over 3 ranks: some rank has no row, most one class
    (lines, weights) = run_ranks(train, 1, tmp_path, labels, tmp_path / "a", 0, 2, 2, 4)[0]
    (others, other_weights) = run_ranks(train, 3, tmp_path, labels, tmp_path / "b", zero_stage, 2, 1, 4)[0]
    assert_same(lines, weights, others, other_weights)


def assert_same(lines, weights, others, other_weights):
    assert len(lines) == len(others)
    for line, other in zip(lines, others, strict=True):
        assert line.keys() == other.keys()
        for name in NAMES:
            if name in line:
                assert other[name] == pytest.approx(line[name], rel=1e-5, abs=2e-5), name
    for name, value in weights.items():
        torch.testing.assert_close(
            other_weights[name], value, rtol=0, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_a_class_nobody_saw_has_no_metric(tmp_path):
    (lines, _) = run_ranks(train, 2, tmp_path, [True] * 6, tmp_path, 1)[0]
    for line in lines:
        assert not {"rewards/rejected", "logps/rejected", "rewards/margins", "rewards/auc"} & line.keys()
        assert np.isfinite(list(v for v in line.values() if isinstance(v, float))).all()


def test_two_epochs_use_every_row_once_each(tmp_path):
    run_ranks(train, 2, tmp_path, MIXED, tmp_path, 2, 4, 1, 6)
    batches = [json.loads(line)["rows"] for line in (tmp_path / "batches.jsonl").read_text().splitlines()]
    assert sorted(chain(*batches[:3])) == sorted(chain(*batches[3:])) == list(range(11))
    assert batches[:3] != batches[3:]
    lines = read_lines(tmp_path / "metrics.jsonl", "train")
    assert [line["consumed_samples"] for line in lines] == [4, 8, 11, 15, 19, 22]
    assert lines[-1]["epoch"] == 2.0
