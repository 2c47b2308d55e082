"""Runs of the trainer on ranks that several tests make, each returning what it trained and wrote down."""

from pathlib import Path
from typing import Any

import torch

from openkto.distributed.gather import gather_weights
from openkto.distributed.strategy import DeepspeedStrategy
from openkto.trainer import KTOTrainer
from tests.helpers.records import assert_close, assert_same_lines, lines
from tests.ranks import run_ranks
from tests.tiny import make_trainer, quiet_args, token_rows

# ---- one start -------------------------------------------------------------------------------------------------------

MIXED = [True, False, True, True, False, False, True, False, True, False, False]
SEED = 3
LR, BETA, WEIGHTS = 3e-4, 0.3, (1.3, 0.7)

Trained = tuple[list[dict], dict[str, torch.Tensor]]


def train(
    labels: list[bool], folder: Path, zero_stage: int = 0, batch: int = 4, micro: int = 4, steps: int = 5, **more: Any
) -> Trained | None:
    """Train on rows with these labels; return (metrics lines, final weights) on rank 0, None elsewhere."""
    more = {"desirable_weight": WEIGHTS[0], "undesirable_weight": WEIGHTS[1]} | more
    trainer, strategy = make_trainer(
        token_rows(labels, SEED), zero_stage=zero_stage, batch=batch, micro=micro, lr=LR, beta=BETA, steps=steps, **more
    )
    trainer.fit(quiet_args(folder, steps, log_batches=True))
    weights = gather_weights(trainer.model.module.model, torch.float32)
    return (lines(folder), weights) if strategy.rank == 0 else None


def assert_same(expected: Trained, got: Trained) -> None:
    """Compare the steps and the weights of two ways to train on the same rows."""
    assert_same_lines(expected[0], got[0])
    assert_close(expected[1], got[1])


# ---- several starts of one run ---------------------------------------------------------------------------------------

STEPS = 6


def prepared(zero_stage: int, **more: Any) -> tuple[KTOTrainer, DeepspeedStrategy]:
    """Return the trainer of a run with all that changes from step to step: a schedule, decay, two epochs."""
    rows = token_rows([True, False, False] * 7)
    settings = {"schedule": "cosine", "warmup_ratio": 0.3, "l2": 0.1, "lr": 3e-4, "batch": 8, "micro": 4}
    return make_trainer(rows, zero_stage=zero_stage, steps=STEPS, **(settings | more))


def start(folder: Path, zero_stage: int = 0, args: dict | None = None, more: dict | None = None) -> dict | None:
    """Train as one start of the command does; return the weights, whole on rank 0."""
    trainer, _ = prepared(zero_stage, **(more or {}))
    trainer.fit(quiet_args(folder, STEPS, **({"load_checkpoint": True} | (args or {}))))
    return gather_weights(trainer.model.module, torch.float32)


def train_in_starts(tmp_path: Path, folder: str, *starts: tuple, args: dict | None = None, **more: Any) -> dict:
    """Run several starts, each (ranks, ZeRO stage, stop after); return the last one's weights."""
    for world_size, zero_stage, stop in starts:
        given = (args or {}) | {"stop_after_steps": stop}
        weights = run_ranks(start, world_size, tmp_path, tmp_path / folder, zero_stage, given, more)[0]
    return weights
