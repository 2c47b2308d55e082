"""A folder is one run's: the lock of a living one is respected, that of a dead one is taken over."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from openkto.errors import ConfigError
from openkto.process import run_lock
from openkto.process.run_lock import Owner, RunLocks

HOLD = """
import sys, time
from pathlib import Path
from openkto.process.run_lock import RunLocks
with RunLocks() as locks:
    try:
        locks.take("--save_path", Path(sys.argv[1]))
    except Exception as error:
        print(error, flush=True)
    else:
        print("holds", flush=True)
        time.sleep(float(sys.argv[2]))
"""


def hold(folder, seconds=30.0, **environ):
    """Start a process that takes a folder, and return it with what it said of that."""
    command = [sys.executable, "-c", HOLD, str(folder), str(seconds)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | environ)
    return process, process.stdout.readline().strip()


def take(folder):
    with RunLocks() as locks:
        locks.take("--save_path", folder)


def test_a_folder_that_a_living_run_holds_is_refused_with_its_host_process_and_job(tmp_path):
    process, said = hold(tmp_path, SLURM_JOB_ID="4711")
    assert said == "holds"
    with pytest.raises(ConfigError) as refused:
        take(tmp_path)
    process.kill()
    process.wait()
    host = os.uname().nodename
    assert str(refused.value).startswith(
        f"--save_path: a folder takes one run at a time; got {tmp_path}, where another run is active (process "
        f"{process.pid} "
        f"on {host}, SLURM job 4711, since "
    )


def test_a_lock_goes_with_its_run_and_that_of_a_killed_one_is_taken_over_at_once(tmp_path):
    process, _ = hold(tmp_path, seconds=0.0)
    process.wait()
    assert list(tmp_path.iterdir()) == []
    process, _ = hold(tmp_path)
    process.kill()  # and not waited for: it is a zombie now
    started = time.monotonic()
    time.sleep(0.2)
    take(tmp_path)
    assert time.monotonic() - started < 5
    process.wait()


def test_of_many_starts_at_once_one_gets_the_folder(tmp_path):
    starts = [hold(tmp_path, 3.0) for _ in range(4)]
    said = [text for _, text in starts]
    for process, _ in starts:
        process.kill()
        process.wait()
    assert said.count("holds") == 1
    assert sum("a folder takes one run at a time" in text for text in said) == 3


def foreign(folder):
    """Leave the lock of a run on another host."""
    owner = dataclasses.replace(Owner.this_process(), host="node7", number_space="another boot")
    file = folder / run_lock.NAME
    file.write_text(json.dumps(dataclasses.asdict(owner)))
    return file


def test_a_run_of_another_host_that_shows_signs_of_life_is_refused_and_a_silent_one_taken_over(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "SILENT_SECONDS", 0.5)
    file, end = foreign(tmp_path), threading.Event()

    def beat():
        while not end.wait(0.1):
            os.utime(file)

    beating = threading.Thread(target=beat)
    beating.start()
    with pytest.raises(ConfigError, match=r"process \d+ on node7"):
        take(tmp_path)
    end.set()
    beating.join()
    started = time.monotonic()
    take(tmp_path)
    assert 0.5 <= time.monotonic() - started < 5


@pytest.mark.parametrize("content", ["", '{"host": "node', "[1]", "\0\0\0"])
def test_a_lock_that_was_cut_short_is_nobodys(tmp_path, content):
    (tmp_path / run_lock.NAME).write_text(content)
    take(tmp_path)


def test_a_lock_is_touched_made_again_when_deleted_and_lost_to_who_took_it(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "BEAT_SECONDS", 0.05)
    file = tmp_path / run_lock.NAME
    with RunLocks() as locks:
        locks.take("--save_path", tmp_path)
        first = file.stat().st_mtime_ns
        time.sleep(0.3)
        assert file.stat().st_mtime_ns > first
        file.unlink()
        time.sleep(0.3)
        assert json.loads(file.read_text())["pid"] == os.getpid()
    assert not file.exists()

    program = HOLD.replace(
        "import sys", "import openkto.process.run_lock; openkto.process.run_lock.BEAT_SECONDS = 0.05\nimport sys"
    )
    command = [sys.executable, "-c", program, str(tmp_path), "30"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "holds\n"
    foreign(tmp_path)
    _, said = process.communicate(timeout=10)
    assert process.returncode == 1
    assert "another run has taken this folder (process" in said


# ---- launchers ------------------------------------------------------------------------------------------------------

RANK = """
import signal, sys, time
from openkto.process.launcher import follow_launcher
signal.signal(signal.SIGTERM, lambda *_: (print("told to stop", flush=True), sys.exit(0)))
follow_launcher()
print("ready", flush=True)
time.sleep(30)
"""
# `deepspeed` starts a second launcher, which starts the ranks.
LAUNCHER = "import subprocess, sys; subprocess.run(sys.argv[2:])"


@pytest.mark.parametrize("killed", ["deepspeed", "deepspeed.launcher.launch"])
def test_a_rank_stops_when_a_launcher_above_it_is_killed(killed, tmp_path):
    inner = [sys.executable, "-c", LAUNCHER, "deepspeed.launcher.launch", sys.executable, "-c", RANK]
    outer = [sys.executable, "-c", LAUNCHER, "deepspeed", *inner]
    process = subprocess.Popen(
        outer, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"RANK": "3"}
    )
    assert process.stdout.readline() == "ready\n"
    children = f"/proc/{process.pid}/task/{process.pid}/children"
    with open(children) as file:
        pids = {"deepspeed": process.pid, "deepspeed.launcher.launch": int(file.read())}
    os.kill(pids[killed], signal.SIGKILL)
    assert process.stdout.readline() == "told to stop\n"
    said = process.stderr.readline()
    assert said == f"rank 3: its launcher (process {pids[killed]}) is gone; it stops, too\n"
    process.kill()
    process.wait()


def test_a_process_without_a_launcher_outlives_what_started_it():
    starter = "import subprocess, sys; subprocess.Popen(sys.argv[1:])"
    rank = RANK.replace("time.sleep(30)", "time.sleep(1.5); print('still here')")
    done = subprocess.run(
        [sys.executable, "-c", starter, sys.executable, "-c", rank], capture_output=True, text=True, timeout=20,
        env=os.environ | {"RANK": "0"},
    )  # fmt: skip
    assert done.stdout.split("\n")[:2] == ["ready", "still here"]
