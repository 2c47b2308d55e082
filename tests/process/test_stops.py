"""Signals go to processes of their own; one that is stuck is killed after a time."""

import dataclasses
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from openkto.config import option
from openkto.config.values import Given, convert, seconds_of
from openkto.errors import ConfigError
from openkto.process.stops import StopRequest, duration, process_age

BEFORE_TRAINING = (
    "the run was asked to stop before its first step; nothing was lost. Start the same command again.\n"
)  # fmt: skip
PROGRAM = """
import ctypes, os, sys, time
from openkto.commands.run import run
from openkto.config.values import seconds_of
from openkto.process.stops import StopRequest

def main(argv):
    with StopRequest() as stop:
        print("ready", flush=True)
{body}

sys.exit(run(main, []))
"""
TRAINING = """
stop.begin_training()
while not stop.is_due():
    time.sleep(0.01)
time.sleep(0.3)
print(stop.reason)
"""


def rank(number: int) -> dict[str, str]:
    return {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": "4"}


def command(body: str, *signals: int, environ: dict[str, str] | None = None) -> tuple[int, str, str]:
    """Run the body in a command, send it the signals 0.2 s apart, and return (status, stdout, stderr)."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(body=textwrap.indent(body, " " * 8))],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **(environ or {})},
    )  # fmt: skip
    assert process.stdout.readline() == "ready\n"
    for number in signals:
        time.sleep(0.2)
        process.send_signal(number)
    try:
        out, err = process.communicate(timeout=20)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        pytest.fail(f"the process did not end; it said {out!r} and {err!r}")
    return process.returncode, out, err


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP"])
def test_a_signal_in_training_leaves_a_note(name):
    done = command(TRAINING, signal.Signals[name], environ=rank(1))
    assert done == (0, f"{name}\n", f"rank 1: {name}: stopping after this step\n")


def test_a_closed_terminal_that_nohup_has_the_run_ignore_stays_ignored():
    earlier = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            stop.begin_training()
            signal.raise_signal(signal.SIGHUP)
            assert not stop.is_due()
    finally:
        signal.signal(signal.SIGHUP, earlier)


def test_further_signals_change_nothing():
    status, out, err = command(TRAINING, signal.SIGUSR1, signal.SIGTERM)
    assert (status, out) == (0, "SIGUSR1\n")
    assert err.splitlines()[1] == "rank 0: SIGTERM: stopping after this step"


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_signal_before_training_ends_the_command_with_76(name):
    status, _, err = command("time.sleep(9)", signal.Signals[name])
    assert status == 76
    assert err == f"rank 0: {name}: stopping before the first step\nstopped: {name}: {BEFORE_TRAINING}"


def test_the_first_rank_alone_says_that_all_stop():
    status, _, err = command("time.sleep(9)", signal.SIGTERM, environ=rank(1))
    assert (status, err) == (76, "rank 1: SIGTERM: stopping before the first step\n")


def test_sigint_before_training_is_the_usual_interrupt():
    status, _, err = command("time.sleep(9)", signal.SIGINT)
    assert (status, err.splitlines()[-1]) == (1, "interrupted")


@pytest.mark.parametrize(
    "what_the_library_does",
    ["pass\nstop.begin_training()", "raise RuntimeError('cannot load the model') from error"],
    ids=["swallows", "turns into another"],
)
def test_a_stop_that_a_library_catches_is_still_one(what_the_library_does):
    body = f"try:\n    time.sleep(9)\nexcept Exception as error:\n{textwrap.indent(what_the_library_does, '    ')}"
    status, _, err = command(body, signal.SIGTERM)
    assert (status, err.splitlines()[-1]) == (76, f"stopped: SIGTERM: {BEFORE_TRAINING.strip()}")


def test_an_error_that_has_nothing_to_do_with_a_stop_stays_one():
    status, _, err = command("raise RuntimeError('no such file')")
    assert (status, "RuntimeError: no such file" in err) == (1, True)


def test_a_second_signal_before_training_does_not_break_into_the_way_out():
    body = "try:\n    time.sleep(9)\nfinally:\n    time.sleep(0.5)\n    print('cleaned up')"
    status, out, _ = command(body, signal.SIGTERM, signal.SIGTERM)
    assert (status, out) == (76, "cleaned up\n")


def test_a_second_sigint_ends_the_process_at_once():
    body = TRAINING.replace("0.3", "9")
    assert command(body, signal.SIGINT, signal.SIGINT)[0] == -signal.SIGINT


def test_two_sigints_end_a_process_whose_main_thread_never_comes_back_from_c():
    # A mutex locked twice: unlike a sleep, no signal gets the thread out of it.
    body = """
    stop.begin_training()
    mutex, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)
    """
    assert command(textwrap.dedent(body), signal.SIGINT, signal.SIGINT)[0] == 128 + signal.SIGINT


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_signal_ends_a_process_that_waits_in_c_for_other_ranks(name):
    body = """
    import openkto.process.stops
    openkto.process.stops.SECONDS_TO_HANDLE = 0.3
    mutex, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)
    """
    status, _, err = command(textwrap.dedent(body), signal.Signals[name])
    assert (status, err) == (76, f"stopped: {name}: {BEFORE_TRAINING}")


def test_a_forked_process_has_the_usual_handlers():
    body = """
    stop.begin_training()
    child = os.fork()
    if child == 0:
        time.sleep(9)
        os._exit(3)
    time.sleep(0.3)
    os.kill(child, 15)
    print(os.waitpid(child, 0)[1], stop.reason)
    """
    assert command(textwrap.dedent(body))[:2] == (0, "15 None\n")


def test_the_earlier_handlers_come_back():
    earlier = [signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGUSR1)]
    ours = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
    try:
        with StopRequest() as stop:
            assert {signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)} == {stop._handle}
        assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)] == ours
        assert signal.set_wakeup_fd(-1) == -1
    finally:
        for number, handler in zip((signal.SIGTERM, signal.SIGUSR1), earlier, strict=True):
            signal.signal(number, handler)


def test_another_thread_than_the_main_one_handles_no_signal():
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def work() -> None:
        with StopRequest():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]


# ---- the time limit -------------------------------------------------------------------------------------------------


def test_the_time_limit_counts_from_the_start_of_the_process():
    stop = StopRequest(max_seconds=process_age() + 0.2)
    assert not stop.is_due()
    time.sleep(0.25)
    assert stop.is_due()


def test_without_a_limit_time_stops_nothing():
    assert not StopRequest().is_due()


def test_the_reason_is_the_flag_as_it_is_typed():
    stop = StopRequest(max_seconds=1)
    stop._started -= 1
    assert stop.is_due()
    assert stop.reason == "the time limit --max_time 0:00:00:01"


def test_training_begins_after_the_limit_too_or_the_run_would_never_get_on():
    stop = StopRequest(max_seconds=1e-9)
    stop.begin_training()
    assert stop.is_due()


def test_the_age_of_a_process_includes_its_imports():
    code = "import time; time.sleep(0.5); from openkto.process.stops import process_age; print(process_age())"
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 0.5 < float(done.stdout) < time.monotonic() - started + 0.02  # the system counts in hundredths


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0:03:55:00", 14_100),
        ("1:00:00:00", 86_400),
        ("0:0:0:1", 1),
        ("12:23:59:59", 1_123_199),
        ("0:08:09:00", 29_340),
    ],
)
def test_a_duration_is_days_hours_minutes_seconds(text, seconds):
    assert seconds_of(text) == seconds
    assert seconds_of(duration(seconds)) == seconds


BAD_DURATIONS = [
    *("", "4h", "3600", "03:55:00", "0:0:03:55:00", "0:24:00:00", "0:00:60:00", "0:00:00:60", "0:00:00:00"),
    *("-1:00:00:00", "0:1.5:00:00", "0: 3:55:00", "+1:00:00:00", "0:٣:00:00", "1_0:00:00:00", "10000:00:00:00", ":::"),
    "9" * 5000 + ":00:00:00",
]


@pytest.mark.parametrize("text", BAD_DURATIONS, ids=lambda text: repr(text[:20]))
def test_what_is_no_duration_is_said_in_one_sentence(text):
    @dataclasses.dataclass
    class Settings:
        max_time: "str | None" = option(None, "", is_duration=True, default_text="no limit")  # noqa: RUF009

    (item,) = dataclasses.fields(Settings)
    assert convert(item, Given("--max_time", "0:03:55:00")) == "0:03:55:00"
    assert convert(item, Given("--max_time", None)) is None
    with pytest.raises(ConfigError) as caught:
        convert(item, Given("--max_time", text))
    got = repr(text) if text else "nothing"
    got = got if len(got) <= 80 else f"{got[:76]}...'"
    assert str(caught.value) == (
        f"--max_time: must be days:hours:minutes:seconds, such as 0:03:55:00; got {got}. Correct it, or leave it out."
    )
