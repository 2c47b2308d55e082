"""A whole command that is killed, or told of a failing disk, at single file operations: the next one makes the run
that would have been, with its records and its `best` and `latest`.

An audit hook counts what the process does to files under --save_path; it can also say in which order they reached the
disk.
"""

import json
import os
import random
import signal
import sys
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest

from openkto.commands import train
from openkto.commands.run import run
from tests.helpers.starts import check_pointers, check_same
from tests.ranks import run_ranks
from tests.text_rows import write_model, write_rows

EVENTS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.chmod", "os.utime")


class Operations:
    """Counts file operations under a folder and lets one of them end the process, or fail."""

    def __init__(self, folder: Path, last: int | None, failure: str) -> None:
        self.folder, self.last, self.failure = str(folder), last, failure
        self.count, self.flushed = 0, []
        fsync = os.fsync

        def noted(descriptor: int) -> None:
            path = os.readlink(f"/proc/self/fd/{descriptor}")
            self.take("fsync", path)
            fsync(descriptor)
            self.flushed.append((path, os.path.isfile(path) and Path(path).read_bytes()))

        os.fsync = noted
        sys.addaudithook(self.hook)

    def hook(self, event: str, args: tuple[Any, ...]) -> None:
        if event not in EVENTS or not args or not isinstance(args[0], str | os.PathLike):
            return
        if event == "open" and not (isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)):
            return
        self.take(event, os.fspath(args[0]))

    def take(self, event: str, path: str) -> None:
        if not os.path.abspath(path).startswith(self.folder):
            return
        self.count += 1
        if self.count == self.last:
            if self.failure == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(5, "Input/output error", path)


def work(argv: list[str], out: str, last: int | None, failure: str) -> tuple[int, int, list]:
    operations = Operations(Path(out), last, failure)
    code = run(train.main, argv)
    return code, operations.count, operations.flushed


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Return a function that runs the command, up to one of its file operations."""
    monkeypatch.setenv("OPENKTO_CACHE", str(tmp_path / "cache"))
    write_model(tmp_path / "model")
    write_rows(tmp_path / "rows.jsonl", 8)
    write_rows(tmp_path / "eval.jsonl", 5)

    def begin(out: Path, last: int | None = None, failure: str = "kill") -> tuple[int, int, list]:
        argv = [
            "--pretrain", f"{tmp_path}/model", "--dataset", f"{tmp_path}/rows.jsonl", "--eval_dataset",
            f"{tmp_path}/eval.jsonl", "--save_path", str(out), "--load_checkpoint", "--train_batch_size", "4",
            "--max_epochs", "2", "--learning_rate", "3e-2", "--zero_stage", "1", "--param_dtype", "fp32",
            "--save_steps", "1", "--eval_steps", "1", "--max_ckpt_num", "2", "--keep_best", "loss", "--log_batches",
        ]  # fmt: skip
        try:
            return run_ranks(work, 1, tmp_path, argv, str(out), last, failure)[0]
        except AssertionError:
            return -signal.SIGKILL, 0, []

    return begin


@pytest.mark.parametrize("tries", [2, pytest.param(100, marks=pytest.mark.slow)])
def test_a_kill_or_a_failing_disk_at_any_file_operation_loses_nothing(tmp_path, start, tries):
    whole, out = tmp_path / "whole", tmp_path / "out"
    code, operations, flushed = start(whole)
    assert code == 0
    best = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    best = min((line["loss"], line["step"]) for line in best if line["kind"] == "eval")[1]
    assert (whole / "checkpoints/best").read_text() == f"global_step{best}"
    check_all_is_on_the_disk_before_finished(whole, flushed)
    chance = random.Random(tries)
    for number in range(tries):
        last, failure = chance.randrange(1, operations), "kill" if number % 3 else "EIO"
        start(out, last, failure)
        for _ in range(3):
            if start(out)[0] == 0:
                break
        check_same(out, whole)
        check_pointers(out, whole)
        rmtree(out)


def check_all_is_on_the_disk_before_finished(out: Path, flushed: list) -> None:
    """Compare what each file holds with what it held when it was last flushed before `finished` was."""
    before = [path for path, _ in flushed].index(f"{out}/checkpoints/finished.part")
    on_disk = dict(flushed[:before])
    for path in out.iterdir():
        if path.is_file() and path.name != ".lock":
            assert on_disk.get(str(path)) == path.read_bytes(), path.name
    assert str(out) in on_disk
