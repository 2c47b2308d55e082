"""kill -9 at random moments, saves included: the same command, started again, makes the run that would have been.

The ranks are processes that run the whole command as a launcher starts it. They are forked from a server that has done
the imports, so that a start takes two seconds.
"""

import json
import multiprocessing
import os
import random
import re
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from shutil import rmtree

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.util import tensor_util

from openkto.commands import train
from openkto.commands.run import run_and_exit
from tests.text_rows import write_model, write_rows
from tests.trainer.test_resume import records

KILLS = 10  # at each ZeRO stage
RANKS, STEPS = 2, 20
SECONDS = 60  # for what takes about three: more is a hang
SECONDS_ALONE = 15  # that ranks have to end by themselves once another is gone; then a launcher ends them

_context = multiprocessing.get_context("forkserver")


class Start:
    """One start of the command on two ranks, each a process of its own, which does something else before."""

    def __init__(self, folder: Path, argv: list[str], before: Callable[[int], None] | None = None) -> None:
        self.logs = [folder / f"rank{rank}.log" for rank in range(RANKS)]
        for log in self.logs:
            log.unlink(missing_ok=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.ranks = [
            _context.Process(target=_work, args=(rank, port, argv, log, dict(os.environ), before), daemon=True)
            for rank, log in enumerate(self.logs)
        ]
        for rank in self.ranks:
            rank.start()

    def kill_at(self, moment: Callable[[], bool], ranks: list[int]) -> None:
        """Wait for a moment of the run, or for its end, and kill some ranks."""
        end = time.monotonic() + SECONDS
        while not moment() and all(rank.is_alive() for rank in self.ranks):
            assert time.monotonic() < end, f"hangs:\n{self.said()}"
            time.sleep(0.0005)
        for rank in ranks:
            self.ranks[rank].kill()

    def statuses(self) -> list[int]:
        """Wait for all ranks to end, as a launcher does, and return how they did."""
        self._wait(SECONDS, until=lambda: any(rank.exitcode is not None for rank in self.ranks))
        self._wait(SECONDS_ALONE, until=lambda: all(rank.exitcode is not None for rank in self.ranks))
        left = [rank for rank in self.ranks if rank.exitcode is None]
        # While groups of ranks are made, a rank waits for those that never come; in training all of them notice.
        assert not left or "start-up: step" not in self.said(), f"hangs:\n{self.said()}"
        for rank in left:
            rank.kill()
        for rank in self.ranks:
            rank.join(SECONDS)
        return [rank.exitcode for rank in self.ranks]

    def _wait(self, seconds: float, until: Callable[[], bool]) -> None:
        end = time.monotonic() + seconds
        while not until() and time.monotonic() < end:
            time.sleep(0.01)

    def said(self) -> str:
        """Return what all ranks wrote."""
        return "\n".join(log.read_text() for log in self.logs if log.exists())


def _work(
    rank: int, port: int, argv: list[str], log: Path, environ: dict[str, str], before: Callable[[int], None] | None
) -> None:
    os.environ.clear()
    os.environ.update(
        environ, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_SIZE=str(RANKS),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), DS_ACCELERATOR="cpu", TORCHDYNAMO_DISABLE="1",
    )  # fmt: skip
    sys.stdout = sys.stderr = log.open("w", buffering=1)
    for standard in (1, 2):
        os.dup2(sys.stderr.fileno(), standard)
    torch.set_num_threads(1)
    if before is not None:
        before(rank)
    run_and_exit(train.main, argv)


# ---- moments --------------------------------------------------------------------------------------------------------


def random_moment(chance: random.Random, out: Path) -> Callable[[], bool]:
    """Return whether it is time, by the clock, by the steps made, or by a save's progress."""
    kind = chance.choice(["clock", "step", "save", "save", "export"])
    if kind == "clock":
        end = time.monotonic() + chance.uniform(0, 4)
        return lambda: time.monotonic() > end
    if kind == "step":
        step = chance.randrange(1, STEPS)
        return lambda: steps_recorded(out) >= step
    if kind == "export":
        return lambda: any(out.glob(".export*/*"))
    scratch, save, delay = out / "checkpoints/.saving", chance.randrange(1, 4), chance.uniform(0, 0.05)
    state = {"seen": 0, "is_there": False}

    def in_a_save() -> bool:
        is_there = scratch.exists()
        state["seen"] += is_there and not state["is_there"]
        state["is_there"] = is_there
        if state["seen"] >= save:
            time.sleep(delay)
        return state["seen"] >= save

    return in_a_save


def steps_recorded(out: Path) -> int:
    file = out / "metrics.jsonl"
    return file.read_bytes().count(b'"kind": "train"') if file.exists() else 0


# ---- the test -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_a_run_that_is_killed_at_random_moments_is_the_run_that_would_have_been(tmp_path, monkeypatch, zero_stage):
    monkeypatch.setenv("OPENKTO_CACHE", str(tmp_path / "cache"))
    write_model(tmp_path / "model")
    write_rows(tmp_path / "rows.jsonl", 40)
    write_rows(tmp_path / "eval.jsonl", 7)

    def start(out: Path) -> Start:
        argv = [
            "--pretrain", f"{tmp_path}/model", "--dataset", f"{tmp_path}/rows.jsonl", "--eval_dataset",
            f"{tmp_path}/eval.jsonl", "--save_path", str(out), "--load_checkpoint", "--train_batch_size", "4",
            "--max_epochs", "2", "--learning_rate", "1e-3", "--zero_stage", str(zero_stage), "--param_dtype", "fp32",
            "--save_steps", "4", "--eval_steps", "5", "--logging_steps", "3", "--max_ckpt_num", "2", "--log_batches",
            "--stall_minutes", "0.2",
        ]  # fmt: skip
        return Start(tmp_path, argv)

    whole, out = tmp_path / "whole", tmp_path / "killed"
    assert start(whole).statuses() == [0, 0]
    chance, kills, newest = random.Random(zero_stage), 0, 0
    while kills < KILLS or (out / "checkpoints").exists():
        run = start(out)
        if kills < KILLS:
            run.kill_at(random_moment(chance, out), chance.choice([[0], [1], [0, 1]]))
        statuses = run.statuses()
        kills += -signal.SIGKILL in statuses
        # A checkpoint that has its name is never lost: the next start goes on from it.
        went_on = re.search(r"resumed from .*global_step(\d+)", run.said())
        assert not went_on or int(went_on[1]) == newest
        assert "is not complete" not in run.said()
        newest = max((int(path.name[11:]) for path in out.glob("checkpoints/global_step*")), default=0)
        if statuses == [0, 0]:
            check_same(out, whole)
            rmtree(out)
            newest = 0


def check_same(out: Path, whole: Path) -> None:
    """Compare all that a run leaves with what one leaves that was never interrupted."""
    assert records(out) == records(whole)
    for name in ("batches.jsonl", "tokens.jsonl", "model.safetensors"):
        assert (out / name).read_bytes() == (whole / name).read_bytes(), name
    assert tensorboard_values(out) == recorded_values(out)
    assert not [*out.rglob(".saving*"), *out.rglob(".export*"), *out.rglob("*.part")]


def tensorboard_values(out: Path) -> list[tuple[str, int, float]]:
    """Return all scalars of all event files: name, step, value."""
    events = [event for file in out.glob("tensorboard/*") for event in EventFileLoader(str(file)).Load()]
    return sorted(
        (value.tag, event.step, float(tensor_util.make_ndarray(value.tensor)))
        for event in events
        for value in event.summary.value
        if value.metadata.plugin_data.plugin_name == "scalars"
    )


def recorded_values(out: Path) -> list[tuple[str, int, float]]:
    """Return what TensorBoard should hold of metrics.jsonl."""
    return sorted(
        (f"{line['kind']}/{name}", line["step"], float(np.float32(value)))
        for line in map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
        if line["kind"] in ("train", "eval")
        for name, value in line.items()
        if name not in ("kind", "step")
    )
