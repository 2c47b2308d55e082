import ctypes
import faulthandler
import logging
import os
import re
import threading
import time
from collections.abc import Callable

import pytest
import torch

from openkto.process import watchdog
from openkto.process.stops import StopRequest
from openkto.process.watchdog import Watchdog
from tests.ranks import run_ranks

STALL = 0.3  # seconds
SENTENCE = re.compile(
    r"^rank (\d+): no progress for ([\d.]+) min in: ([^;]+); the stacks of all threads follow\.", re.M
)


class Clock:
    """A clock that stands still until it is set."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def wait_until(condition: Callable[[], object]) -> None:
    """Wait for what a watchdog's thread does, which may be long in coming on busy cores."""
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.01)


def wait_for_words(capfd: pytest.CaptureFixture, words: str) -> str:
    """Return what is written to stderr until it has these words."""
    said = []
    wait_until(lambda: said.append(capfd.readouterr().err) or words in "".join(said))
    return "".join(said)


@pytest.fixture
def watch(monkeypatch):  # which is undone later: a watchdog that a failed test left must not end this process
    """Return a function that makes a `Watchdog` and have all of them stopped."""
    made = []

    def make(stall_seconds: float = STALL, rank: int = 1, **more) -> Watchdog:
        made.append(Watchdog(stall_seconds / 60, rank, **more))
        return made[-1]

    yield make
    for one in made:
        one.stop()


def test_a_stall_is_said_once_with_its_phase_and_all_stacks(watch, capfd):
    dog = watch(rank=3)
    dog.phase("evaluation at step 40")
    threading.Thread(target=time.sleep, args=(3 * STALL,), name="a reader").start()
    time.sleep(3 * STALL)
    dog.stop()
    err = capfd.readouterr().err
    assert SENTENCE.findall(err) == [("3", "0.005", "evaluation at step 40")]
    assert f"py-spy dump --native --pid {os.getpid()}`" in err
    lines = err.splitlines()
    assert all(line.startswith("rank 3: ") for line in lines)
    assert lines[1] == "rank 3: MainThread, most recent call first:"
    assert " in test_a_stall_is_said_once_with_its_phase_and_all_stacks" in lines[2]
    assert "rank 3: a reader, most recent call first:" in lines
    assert "watchdog, most recent" not in err


def test_a_stall_is_said_again_after_progress(watch, capfd):
    dog = watch()
    for phase in ("step 1", "step 2"):
        dog.phase(phase)
        time.sleep(2 * STALL)
    assert [phase for _, _, phase in SENTENCE.findall(capfd.readouterr().err)] == ["step 1", "step 2"]


def test_progress_is_no_stall(watch, capfd):
    dog = watch()
    for _ in range(12):
        time.sleep(STALL / 4)
        dog.beat()
    assert capfd.readouterr().err == ""


def test_the_time_is_that_since_the_last_beat(watch, capfd, monkeypatch):
    monkeypatch.setattr(watchdog, "LONGEST_NAP_SECONDS", 0.01)
    clock = Clock()
    dog = watch(1800, clock=clock)
    clock.now += 1000
    dog.beat()
    clock.now += 1799
    time.sleep(0.1)
    assert capfd.readouterr().err == ""
    clock.now += 1
    assert SENTENCE.findall(wait_for_words(capfd, "stacks of all threads follow.")) == [
        ("1", "30", "importing libraries")
    ]


@pytest.mark.parametrize(
    ("library", "start"),
    [
        (ctypes.CDLL, "rank 1: no progress for 0.005 min in: step 7"),  # as a collective, which lets go of the lock
        (ctypes.PyDLL, "Timeout (0:00:01.33"),  # holds the interpreter's lock
    ],
    ids=["lock free", "lock held"],
)
def test_a_stall_in_c_is_seen_while_it_lasts(watch, capfd, library, start):
    dog = watch()
    dog.phase("step 7")
    library(None).usleep(1_700_000)
    dog.beat()
    os.write(2, b"back\n")
    dog.stop()
    during, back, _ = capfd.readouterr().err.partition("back\n")
    assert during.startswith(start)
    assert " in test_a_stall_in_c_is_seen_while_it_lasts" in during
    assert back


def stall_on_rank_1(folder: str) -> str:
    rank = torch.distributed.get_rank()
    with open(f"{folder}/{rank}.txt", "w") as file:
        os.dup2(file.fileno(), 2)
    dog = Watchdog(0.5 / 60, rank)
    dog.phase("step 3")
    if rank == 1:
        time.sleep(1.2)
    torch.distributed.barrier()
    dog.stop()
    with open(f"{folder}/{rank}.txt") as file:
        return file.read()


def test_the_ranks_that_wait_for_a_stuck_one_dump_too(tmp_path):
    waiting, stuck = run_ranks(stall_on_rank_1, 2, tmp_path, str(tmp_path))
    assert [SENTENCE.findall(text) for text in (waiting, stuck)] == [
        [("0", "0.00833333", "step 3")],
        [("1", "0.00833333", "step 3")],
    ]
    assert " in barrier" in waiting
    assert " in barrier" not in stuck


# ---- off, and the end -----------------------------------------------------------------------------------------------


def test_0_minutes_is_off_and_leaves_the_timer_of_others_alone(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    before = threading.active_count()
    with (tmp_path / "log").open("w") as log:
        faulthandler.dump_traceback_later(0.2, file=log)
        dog = Watchdog(0, 0)
        dog.phase("loading the policy")
        dog.beat()
        assert threading.active_count() == before
        dog.stop()
        time.sleep(0.4)
    assert "Timeout" in (tmp_path / "log").read_text()
    assert caplog.messages == []


def test_after_the_end_there_is_no_thread_and_no_timer(watch, capfd):
    before = threading.active_count()
    dog = watch()
    assert threading.active_count() == before + 1
    dog.stop()
    dog.stop()
    assert threading.active_count() == before
    time.sleep(2 * STALL)
    assert capfd.readouterr().err == ""


# ---- start-up -------------------------------------------------------------------------------------------------------


def test_rank_0_says_each_phase_of_start_up_until_the_first_beat(watch, caplog, monkeypatch):
    monkeypatch.setattr(watchdog, "process_age", lambda: 2.0)
    caplog.set_level(logging.DEBUG)
    clock = Clock()
    dog = watch(1800, rank=0, clock=clock)
    clock.now += 1.25
    dog.phase("loading the policy")
    clock.now += 4
    dog.phase("step 1")
    dog.beat()
    dog.phase("step 2")
    assert caplog.messages == [
        "start-up: loading the policy (3.2 s since the start)",
        "start-up: step 1 (7.2 s since the start)",
    ]


def loading(watch, rank, caplog, monkeypatch):
    """Return a clock and a watchdog, in a phase of start-up, that looks at it all the time."""
    monkeypatch.setattr(watchdog, "LONGEST_NAP_SECONDS", 0.01)
    caplog.set_level(logging.INFO)
    clock = Clock()
    dog = watch(1800, rank=rank, clock=clock)
    dog.phase("loading the policy")
    return clock, dog


def test_a_long_phase_of_start_up_is_said_after_ten_seconds_and_once_a_minute(watch, caplog, monkeypatch):
    clock, dog = loading(watch, 0, caplog, monkeypatch)
    caplog.clear()
    for seconds, times in ((9, 0), (2, 1), (48, 1), (2, 2), (59, 3), (30, 3), (31, 4)):  # 9, 11, 59, 61, 120, 150, 181
        clock.now += seconds
        time.sleep(0.06)
        wait_until(lambda times=times: len(caplog.messages) >= times)
    lasting = [" ...", *(f", for {minutes} min" for minutes in (1, 2, 3))]
    assert caplog.messages == [f"start-up: loading the policy{text}" for text in lasting]
    dog.phase("making the engine")
    caplog.clear()
    clock.now += 61
    wait_until(lambda: caplog.messages)
    dog.beat()
    clock.now += 61
    time.sleep(0.06)
    assert caplog.messages == ["start-up: making the engine, for 1 min"]


def test_the_other_ranks_say_nothing_of_start_up(watch, caplog, monkeypatch):
    clock, _ = loading(watch, 1, caplog, monkeypatch)
    clock.now += 61
    time.sleep(0.06)
    assert caplog.messages == []


# ---- what ends a run ------------------------------------------------------------------------------------------------


ends_here = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


@pytest.fixture
def ended(monkeypatch):
    """Return the statuses with which a process would have ended; its watchdog ends with the first."""
    statuses: list[int] = []

    def end(status: int) -> None:
        statuses.append(status)
        raise SystemExit

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(watchdog, "LONGEST_NAP_SECONDS", 0.01)
    return statuses


@ends_here
def test_a_stall_that_lasts_ends_the_process_with_the_status_of_a_stop(watch, ended, capfd):
    clock = Clock()
    dog = watch(1800, clock=clock, end_minutes=90)
    dog.beat()
    dog.phase("step 7")
    clock.now += 1800 + 5399
    wait_for_words(capfd, "If this lasts, the run ends in 90 min (--stall_end_minutes).")
    time.sleep(0.1)
    capfd.readouterr()
    assert ended == []
    clock.now += 1
    wait_until(lambda: ended)
    assert ended == [75]
    assert capfd.readouterr().err == (
        "rank 1: stopped: no progress for 120 min in: step 7; --stall_end_minutes sets this limit. This rank ends with "
        "status 75. Start the same command again with --load_checkpoint.\n"
    )


@pytest.mark.parametrize("more", [{"end_minutes": 0}, {"end_minutes": 90, "in_start_up": True}])
def test_start_up_and_a_limit_of_0_end_nothing(watch, ended, capfd, more):
    clock, in_start_up = Clock(), more.pop("in_start_up", False)
    dog = watch(1800, clock=clock, **more)
    if not in_start_up:
        dog.beat()
    clock.now += 1e6
    wait_for_words(capfd, "The run keeps waiting.")
    time.sleep(0.1)
    assert ended == []


@ends_here
def test_without_checkpoints_the_status_is_that_of_an_error(watch, ended):
    clock = Clock()
    watch(1800, clock=clock, end_minutes=1, can_go_on=False).beat()
    clock.now += 2000
    wait_until(lambda: ended)
    assert ended == [1]


@ends_here
def test_a_rank_that_was_asked_to_stop_and_waits_says_so_and_then_ends(watch, ended, capfd):
    clock, stop = Clock(), StopRequest()
    dog = watch(1800, clock=clock, stop=stop)
    dog.beat()
    dog.phase("step 7")
    clock.now += 1000  # a slow step that nobody wants to end
    time.sleep(0.05)
    stop.reason = "SIGTERM"
    time.sleep(0.2)
    clock.now += 31
    assert wait_for_words(capfd, "without a new checkpoint.\n") == (
        "rank 1: SIGTERM: still in: step 7, where nothing moves: it waits for another rank or a disk. "
        "If this lasts, this process ends in 269 s, without a new checkpoint.\n"
    )
    dog.phase("saving a checkpoint at step 7", is_saving=True)
    clock.now += 400
    time.sleep(0.2)
    assert ended == [], "a save is worth the wait"
    dog.phase("step 8")
    clock.now += 299
    time.sleep(0.2)
    assert ended == []
    clock.now += 2
    wait_until(lambda: ended)
    assert ended == [75]


def test_the_time_that_a_process_was_stopped_for_is_no_stall_of_its_own(watch, ended, monkeypatch):
    dog = watch(3, end_minutes=1 / 60)  # naps of 0.01 s
    dog.beat()
    monkeypatch.setattr(watchdog, "LONGEST_NAP_SECONDS", 0.0)
    real, jump = time.monotonic, 0.0
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: real() + jump)
    dog._clock = lambda: real() + jump
    jump = 1000.0
    time.sleep(0.2)
    assert ended == []
