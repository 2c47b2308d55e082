"""The train command with a cached reference: the numbers of a model beside the policy, and none in memory."""

import json
import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest
import safetensors.torch
import torch

from openkto.commands import precompute_reference, train
from openkto.models import Actor
from openkto.trainer import reference_cache
from tests.ranks import run_ranks
from tests.test_cli import flags, lines, place, run_to_status  # noqa: F401 (place is a fixture)

NAMES = ("loss", "kl", "kl_unclamped", "grad_norm", "rewards/chosen", "rewards/rejected", "logps/chosen")
# 20 rows; 3 epochs: 20 matched pairs and 60 mismatched ones, of which chance makes some twice. 7 + 7 of the eval set.
PAIRS = 14 + 20
FOUND = "pairs are in"


def assert_same_metrics(expected, got):
    for kind in ("train", "eval"):
        a, b = lines(expected, kind), lines(got, kind)
        assert len(a) == len(b) > 0
        for line, other in zip(a, b, strict=True):
            assert line.keys() == other.keys()
            for name in set(NAMES) & line.keys():
                assert other[name] == pytest.approx(line[name], rel=1e-5, abs=2e-5), name


def parts(place):  # noqa: F811
    return sorted((place / "cache/ref").glob("*/part-*.parquet"))


def told(argv, world_size, place):  # noqa: F811
    """Run a training command that must succeed; return what its first rank said."""
    (code, said), *_ = run_ranks(run_to_status, world_size, place, argv)
    assert code == 0, said
    return said


def counted(argv):
    """Train; return the forwards of frozen models before the first step, and after it."""
    counts, is_training, forward = [0, 0], [False], Actor.forward

    def counting(self, *args, **more):
        if any(parameter.requires_grad for parameter in self.parameters()):
            is_training[0] = True
        else:
            counts[is_training[0]] += 1
        return forward(self, *args, **more)

    Actor.forward = counting
    train.main(argv)
    return counts


@pytest.mark.parametrize("zero_stage", ["0", "1", "2", "3"])
def test_three_epochs_on_two_ranks_resumed_on_one_have_the_numbers_of_a_model(place, zero_stage):  # noqa: F811
    common = ["--max_epochs", "3", "--zero_stage", zero_stage, "--eval_at_start", "--micro_train_batch_size", "3"]
    run_ranks(train.main, 1, place, flags(place, *common, "--ref_mode", "model", "--save_path", f"{place}/model_run"))
    cached = flags(place, *common, "--ref_mode", "cached", "--load_checkpoint")
    run_ranks(train.main, 2, place, [*cached, "--stop_after_steps", "4"])
    before = parts(place)
    (counts,) = run_ranks(counted, 1, place, cached)
    assert parts(place) == before
    assert counts[0] > 0  # the sample that is checked
    assert counts[1] == 0
    assert_same_metrics(place / "model_run", place / "out")
    a, b = (safetensors.torch.load_file(place / run / "model.safetensors") for run in ("model_run", "out"))
    for name, tensor in a.items():
        torch.testing.assert_close(b[name], tensor, rtol=0, atol=1e-5)
