"""Power cuts: what an ext4 file system on a loop device has on its disk at one moment, without what the system still
held in memory, is mounted as after a cut, and the same command makes the run that would have been.
"""

import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers.starts import Start, check_pointers, check_same, random_moment
from tests.text_rows import write_model, write_rows

CUTS = 10
IMAGE_BYTES = 96 * 2**20


class Disk:
    """An ext4 file system in a file, mounted while it is in use."""

    def __init__(self, folder: Path, name: str) -> None:
        self.image, self.place = folder / f"{name}.image", folder / name
        self.place.mkdir()

    def make(self) -> None:
        with self.image.open("wb") as file:
            file.truncate(IMAGE_BYTES)
        run("mkfs.ext4", "-q", str(self.image))

    def mount(self) -> Path:
        run("mount", "-o", "loop", str(self.image), str(self.place))
        return self.place

    def unmount(self) -> None:
        subprocess.run(["umount", str(self.place)], check=False, capture_output=True)


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture
def disks(tmp_path) -> Iterator[Callable[[str], Disk]]:
    """Return a function that gives disks, or skip where nobody may mount one."""
    made: list[Disk] = []

    def disk(name: str) -> Disk:
        made.append(Disk(tmp_path, name))
        return made[-1]

    try:
        probe = disk("probe")
        probe.make()
        probe.mount()
        probe.unmount()
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"only where root may mount a loop device: {error}")
    yield disk
    for one in made:
        one.unmount()


def command(tmp_path: Path, out: Path) -> list[str]:
    return [
        "--pretrain", f"{tmp_path}/model", "--dataset", f"{tmp_path}/rows.jsonl", "--eval_dataset",
        f"{tmp_path}/eval.jsonl", "--save_path", str(out), "--load_checkpoint", "--train_batch_size", "4",
        "--max_epochs", "2", "--learning_rate", "1e-3", "--zero_stage", "2", "--param_dtype", "fp32",
        "--save_steps", "4", "--eval_steps", "5", "--logging_steps", "3", "--max_ckpt_num", "2", "--log_batches",
        "--keep_best", "loss",
    ]  # fmt: skip


@pytest.mark.slow
def test_a_power_cut_at_any_moment_loses_nothing_that_was_said_to_be_saved(tmp_path, monkeypatch, disks):
    monkeypatch.setenv("OPENKTO_CACHE", str(tmp_path / "cache"))
    write_model(tmp_path / "model")
    write_rows(tmp_path / "rows.jsonl", 40)
    write_rows(tmp_path / "eval.jsonl", 7)
    whole = tmp_path / "whole"
    assert Start(tmp_path, command(tmp_path, whole)).statuses() == [0, 0]
    chance = random.Random(0)
    for number in range(CUTS):
        disk, after = disks(f"before{number}"), disks(f"after{number}")
        disk.make()
        out = disk.mount() / "out"
        one = Start(tmp_path, command(tmp_path, out))
        if number % 3:
            one.kill_at(random_moment(chance, out), [])
        else:
            assert one.statuses() == [0, 0], one.said()  # the power goes right after the end
        stop_all(one, signal.SIGSTOP)
        shutil.copyfile(disk.image, after.image)
        stop_all(one, signal.SIGKILL)
        out = after.mount() / "out"
        is_finished = (out / "checkpoints/finished").exists()
        if number % 3 == 0:
            assert is_finished
        if is_finished:
            check_model(out, whole)
        again = Start(tmp_path, command(tmp_path, out))
        assert again.statuses() == [0, 0], again.said()
        assert ("nothing is left to do" in again.said()) == is_finished
        check_same(out, whole)
        check_pointers(out, whole)
        disk.unmount()
        after.unmount()


def stop_all(one: Start, number: int) -> None:
    for rank in one.ranks:
        if rank.is_alive():
            os.kill(rank.pid, number)
    time.sleep(0.05)


def check_model(out: Path, whole: Path) -> None:
    for name in ("model.safetensors", "config.json", "tokenizer.json", "tokens.jsonl", "batches.jsonl"):
        assert (out / name).read_bytes() == (whole / name).read_bytes(), name
