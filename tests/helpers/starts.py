"""Starts of the whole command on two ranks that a test may stop, signal or kill, and what such a run must leave.

The ranks are processes that run the command as a launcher starts it. They are forked from a server that has done the
imports, so that a start takes two seconds.
"""

import json
import multiprocessing
import os
import random
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.util import tensor_util

from openkto.commands import train
from openkto.commands.run import run_and_exit
from tests.helpers.records import records

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

    def wait_for(self, moment: Callable[[], bool]) -> None:
        """Wait for a moment of the run."""
        end = time.monotonic() + SECONDS
        while not moment():
            assert time.monotonic() < end, f"it never happened:\n{self.said()}"
            time.sleep(0.02)

    def kill_at(self, moment: Callable[[], bool], ranks: list[int]) -> None:
        """Wait for a moment of the run, or for its end, and kill some ranks."""
        end = time.monotonic() + SECONDS
        while not moment() and all(rank.is_alive() for rank in self.ranks):
            assert time.monotonic() < end, f"hangs:\n{self.said()}"
            time.sleep(0.0005)
        for rank in ranks:
            self.ranks[rank].kill()

    def statuses(self) -> list[int | None]:
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
    run_and_exit(train.main, [*argv, "--verbose"])


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


def check_pointers(out: Path, whole: Path) -> None:
    """Compare which checkpoints are the newest, the best and the last of the run."""
    for pointer in ("latest", "best", "finished"):
        # `finished` goes on with the model's files.
        name = (whole / "checkpoints" / pointer).read_text().splitlines()[0]
        assert (out / "checkpoints" / pointer).read_text().splitlines()[0] == name
        assert (out / "checkpoints" / name / "manifest.json").is_file()
