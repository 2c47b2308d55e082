"""A thread in every rank that logs what a run is doing during start-up and where it hangs, and ends a hanging run.

A rank that hangs in a collective does so because another rank never came, and only that one's stack tells why. No
channel between ranks is needed to get it: they run in step, so all of them stop making progress within one step, and
each writes its own stacks after the same time. Each also ends itself after the same time; a rank that cannot, such as
one that was stopped with SIGSTOP, is killed by the launcher, which sees the others end.
"""

import faulthandler
import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable

from openkto.errors import StopError
from openkto.process.stops import StopRequest, process_age

log = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 60.0
LONG_SECONDS = 10.0  # of a phase that is said
LONGEST_NAP_SECONDS = 5.0
LATE_SECONDS = 1.0  # busy cores wake a thread up to so late
STDERR = 2
# How long a rank that was asked to stop may be without progress: more than a slow micro-batch or a compilation takes.
SECONDS_TO_STOP = 300.0


class Watchdog:
    """Writes the stacks of this rank's threads once it has made no progress for some time.

    Start-up lasts until the first `beat`. Rank 0 logs each of its phases at DEBUG, and at INFO one that lasts: after
    ten seconds, and then once a minute.

    A thread does the watching. Python code that never lets go of the interpreter's lock stops that thread too, so
    `faulthandler`'s timer, which needs no lock, stands behind it: then the stacks come without the phase. A process
    has one such timer: while the watchdog is on, it is the watchdog's.

    Args:
        stall_minutes: how long no progress is a stall; 0 turns everything here off.
        rank: this process's.
        clock: seconds, for tests.
        end_minutes: how long after a stall was said the process ends, if it has made progress before; 0 is never.
        stop: asked whether the process is to stop: without progress for `SECONDS_TO_STOP` it ends then. Not while it
            saves, which may take long and is worth the wait.
        can_go_on: whether there are checkpoints, so that the process ends with the status of a requested stop.
    """

    def __init__(
        self,
        stall_minutes: float,
        rank: int,
        clock: Callable[[], float] = time.monotonic,
        *,
        end_minutes: float = 0.0,
        stop: StopRequest | None = None,
        can_go_on: bool = True,
    ) -> None:
        self._stall_seconds, self._end_seconds = stall_minutes * 60, end_minutes * 60
        self._stop, self._can_go_on = stop, can_go_on
        self._asked_at: float | None = None  # when the thread saw that the process was asked to stop
        self._is_said = False
        self._has_begun = self._is_saving = False
        self._nap = min(LONGEST_NAP_SECONDS, self._stall_seconds / 10)
        self._rank = rank
        self._clock = clock
        self._process_start = clock() - process_age()
        self._last_progress = clock()
        self._phase, self._phase_start, self._times_said = "importing libraries", clock(), 0
        self._is_starting = stall_minutes > 0 and rank == 0
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        if stall_minutes > 0:
            # The timer first: the thread may never get to it.
            self._set_timer(self._stall_seconds)
            self._thread = threading.Thread(target=self._watch, daemon=True, name="watchdog")
            self._thread.start()

    def __enter__(self) -> "Watchdog":
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def phase(self, name: str, *, is_saving: bool = False) -> None:
        """Say what the main thread does from now on: "loading the policy", "evaluation at step 40"."""
        now = self._clock()
        self._is_saving = is_saving
        self._phase, self._phase_start, self._times_said = name, now, 0
        self._last_progress = now
        if self._is_starting:
            log.debug("start-up: %s (%.1f s since the start)", name, now - self._process_start)

    def beat(self) -> None:
        """Say that there was progress; called for every micro-batch."""
        self._last_progress = self._clock()
        self._is_starting = False
        self._has_begun = True

    def stop(self) -> None:
        """End the thread and its timer."""
        if self._thread is not None:
            self._stopped.set()
            self._thread.join(LONGEST_NAP_SECONDS)  # no longer: it may be writing to a pipe that nobody reads
            self._thread = None
            faulthandler.cancel_dump_traceback_later()

    # ---- the thread -------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        timer_is_for = said_for = None  # the last progress that the timer counts from; that a stall was said for
        looked = time.monotonic()
        while not self._stopped.wait(self._nap):
            # The time that this process was itself stopped for, by SIGSTOP or Ctrl-Z, is no stall of its own.
            overslept = time.monotonic() - looked - self._nap
            if overslept > LATE_SECONDS:
                self._last_progress += overslept
            looked = time.monotonic()
            now, last_progress = self._clock(), self._last_progress
            seconds_left = self._stall_seconds - (now - last_progress)
            if timer_is_for != last_progress:
                self._set_timer(seconds_left)
                timer_is_for = last_progress
            if seconds_left <= 0 and said_for != last_progress:
                faulthandler.cancel_dump_traceback_later()
                self._write(self._report())
                said_for = last_progress
            if self._has_begun and self._end_seconds > 0 and seconds_left <= -self._end_seconds:
                minutes = (self._stall_seconds + self._end_seconds) / 60
                self._end(f"no progress for {minutes:g} min in: {self._phase}; --stall_end_minutes sets this limit")
            self._see_to_a_stop(now)
            self._say_it_lasts(now)

    def _see_to_a_stop(self, now: float) -> None:
        """End a process that was asked to stop and waits for what does not come: the loop cannot see the request."""
        if self._stop is None or self._stop.reason is None or not self._has_begun or self._is_saving:
            return
        self._asked_at = now if self._asked_at is None else self._asked_at
        waited = now - max(self._asked_at, self._last_progress)
        if waited >= SECONDS_TO_STOP:
            self._end(f"{self._stop.reason}: no progress for {waited:.0f} s in: {self._phase}")
        elif waited >= SECONDS_TO_STOP / 10 and not self._is_said:
            self._is_said = True
            self._write(
                f"rank {self._rank}: {self._stop.reason}: still in: {self._phase}, where nothing moves: it waits for "
                f"another rank or a disk. If this lasts, this process ends in {SECONDS_TO_STOP - waited:.0f} s, "
                "without a new checkpoint.\n"
            )

    def _end(self, why: str) -> None:
        """End the process, from this thread: its main thread does not come back from where it waits."""
        status = StopError.exit_code if self._can_go_on else 1
        what = "Start the same command again with --load_checkpoint" if self._can_go_on else "Start it again"
        self._write(f"rank {self._rank}: stopped: {why}. This rank ends with status {status}. {what}.\n")
        os._exit(status)

    def _write(self, text: str) -> None:
        with open(STDERR, "wb", closefd=False) as stderr:
            stderr.write(text.encode(errors="backslashreplace"))

    def _set_timer(self, seconds_left: float) -> None:
        """Set faulthandler's timer later than the thread speaks, busy cores or not: it is for when that cannot."""
        later = self._nap + max(self._nap, LATE_SECONDS)
        faulthandler.dump_traceback_later(max(0.0, seconds_left) + later, file=STDERR)

    def _say_it_lasts(self, now: float) -> None:
        """Log that a phase of start-up lasts: a line after some seconds, and one for each whole minute."""
        seconds = now - self._phase_start
        minutes = int(seconds / HEARTBEAT_SECONDS)
        times = minutes + (seconds >= LONG_SECONDS)
        if self._is_starting and times > self._times_said:
            log.info("start-up: %s%s", self._phase, f", for {minutes} min" if minutes else " ...")
            self._times_said = times

    def _report(self) -> str:
        """Return the sentence and all stacks, in one piece and with the rank on each line: all ranks write at once."""
        pid = os.getpid()
        sentence = (
            f"no progress for {self._stall_seconds / 60:g} min in: {self._phase}; the stacks of all threads follow. "
            "Ranks that wait for a stuck one say the same: look at the one whose main thread is in no collective. "
            f"This is process {pid} on {socket.gethostname()}, where `py-spy dump --native --pid {pid}` shows more. "
            f"{self._what_follows()} --stall_minutes sets when this is said."
        )
        return "".join(f"rank {self._rank}: {line}\n" for line in [sentence, *_stacks()])

    def _what_follows(self) -> str:
        if self._has_begun and self._end_seconds > 0:
            return f"If this lasts, the run ends in {self._end_seconds / 60:g} min (--stall_end_minutes)."
        return "The run keeps waiting."


def _stacks() -> list[str]:
    """Return the other threads' stacks, read only from memory: source files may lie on the very disk that hangs."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines = []
    for ident, top in sorted(sys._current_frames().items(), key=lambda item: names.get(item[0]) != "MainThread"):
        if ident != threading.get_ident():
            # Autograd's threads, in which backward hooks run, have no name in Python.
            lines.append(f"{names.get(ident, ident)}, most recent call first:")
            stack = traceback.walk_stack(top)
            lines += [f"  {frame.f_code.co_filename}:{line} in {frame.f_code.co_name}" for frame, line in stack]
    return lines
