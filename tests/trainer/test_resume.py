"""A run that is interrupted and taken up again is the run that would have been."""

import json
import random

import numpy as np
import pytest
import torch

from openkto.distributed.gather import gather_weights
from tests.ranks import run_ranks
from tests.tiny import make_trainer, quiet_args, token_rows

STEPS = 6
# What differs from one run to the next without any reason to care.
TIMES = {"samples_per_second", "tokens_per_second", "step_time_s", "peak_memory_gb", "seconds"}


def records(folder) -> list[dict]:
    """Return the lines of metrics.jsonl without the times, and without those that a start writes."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in TIMES} for line in lines if line["kind"] != "run"]


def run(folder, zero_stage=0, args=None, **more):
    """Train as one start of the command does; return the weights on rank 0, and the generators' next draws."""
    rows = token_rows([True, False, False] * 7)
    settings = {"schedule": "cosine", "warmup_ratio": 0.3, "l2": 0.1, "lr": 3e-4, "batch": 8, "micro": 3}
    trainer, strategy = make_trainer(rows, zero_stage=zero_stage, steps=STEPS, **(settings | more))
    if strategy.zero_stage == 3:
        assert all(p.ds_tensor.numel() < p.ds_numel or strategy.world_size == 1 for p in trainer.model.parameters())
    trainer.fit(quiet_args(folder, STEPS, load_checkpoint=True, **(args or {})))
    weights = gather_weights(trainer.model, trainer.model.module, torch.float32)
    draws = [random.random(), float(np.random.rand()), float(torch.rand(()))]
    return weights, strategy.gather_objects(draws), trainer.checkpoints


def interrupted(folder, stage, stops, worlds, tmp_path, stages=None, **more):
    """Run in several starts, each on its own number of ranks; return what the last one returned."""
    result = None
    for i, (stop, world) in enumerate(zip([*stops, None], worlds, strict=True)):
        args = {"stop_after_steps": stop} | more.get("args", {})
        own = {name: value for name, value in more.items() if name != "args"}
        result = run_ranks(start, world, tmp_path, folder, stages[i] if stages else stage, args, own)[0]
    return result


def start(folder, stage, args, more):
    return run(folder, stage, args, **more)[:2]


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_a_resumed_run_is_bit_equal_to_one_never_interrupted(tmp_path, zero_stage):
    args = {"logging_steps": 4, "eval_steps": 2, "log_batches": True}
    more = {"args": args, "eval_rows": token_rows([True, False, True], seed=9)}
    weights, draws = interrupted(tmp_path / "whole", zero_stage, [], [2], tmp_path, **more)
    got, got_draws = interrupted(tmp_path / "cut", zero_stage, [1, 3, 5], [2] * 4, tmp_path, **more)
    for name, weight in weights.items():
        assert torch.equal(weight, got[name]), name
    assert got_draws == draws
    assert records(tmp_path / "cut") == records(tmp_path / "whole")
    for name in ("batches.jsonl", "tokens.jsonl"):
        assert (tmp_path / "cut" / name).read_text() == (tmp_path / "whole" / name).read_text()
