"""Says what a run is doing while it starts, and where it hangs: a thread in every rank.

A rank that hangs in a collective does so because another rank never came, and only that one's stack tells why. No
channel between ranks is needed to get it: they run in step, so all of them stop making progress within one step, and
each writes its own stacks after the same time.
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

from openkto.stops import process_age

log = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 60.0
LONGEST_NAP_SECONDS = 5.0
STDERR = 2


class Watchdog:
    """Writes the stacks of this rank's threads once it has made no progress for some time.

    Start-up lasts until the first `beat`. Rank 0 logs a line for each of its phases, and one a minute while it lasts.

    A thread does the watching. Python code that never lets go of the interpreter's lock stops that thread too, so
    `faulthandler`'s timer, which needs no lock, stands behind it: then the stacks come without the phase. A process
    has one such timer: while the watchdog is on, it is the watchdog's.

    Args:
        stall_minutes: how long no progress is a stall; 0 turns everything here off.
        rank: this process's.
        clock: seconds, for tests.
    """

    def __init__(self, stall_minutes: float, rank: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._stall_seconds = stall_minutes * 60
        self._nap = min(LONGEST_NAP_SECONDS, self._stall_seconds / 10)
        self._rank = rank
        self._clock = clock
        self._process_start = clock() - process_age()
        self._last_progress = clock()
        self._phase, self._phase_start, self._minutes_said = "start-up", clock(), 0
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

    def phase(self, name: str) -> None:
        """Say what the main thread does from now on: "loading the policy", "evaluation at step 40"."""
        now = self._clock()
        self._phase, self._phase_start, self._minutes_said = name, now, 0
        self._last_progress = now
        if self._is_starting:
            log.info("start-up: %s (%.1f s since the start)", name, now - self._process_start)

    def beat(self) -> None:
        """Say that there was progress; called for every micro-batch."""
        self._last_progress = self._clock()
        self._is_starting = False

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
        while not self._stopped.wait(self._nap):
            now, last_progress = self._clock(), self._last_progress
            seconds_left = self._stall_seconds - (now - last_progress)
            if timer_is_for != last_progress:
                self._set_timer(seconds_left)
                timer_is_for = last_progress
            if seconds_left <= 0 and said_for != last_progress:
                faulthandler.cancel_dump_traceback_later()
                with open(STDERR, "wb", closefd=False) as stderr:
                    stderr.write(self._report().encode(errors="backslashreplace"))
                said_for = last_progress
            self._say_it_lasts(now)

    def _set_timer(self, seconds_left: float) -> None:
        """Set faulthandler's timer two naps later than the thread would speak: it is for when the thread cannot."""
        faulthandler.dump_traceback_later(max(0.0, seconds_left) + 2 * self._nap, file=STDERR)

    def _say_it_lasts(self, now: float) -> None:
        """Log a line for each whole minute of a phase of start-up."""
        minutes = int((now - self._phase_start) / HEARTBEAT_SECONDS)
        if self._is_starting and minutes > self._minutes_said:
            log.info("start-up: still %s, %d min", self._phase, minutes)
            self._minutes_said = minutes

    def _report(self) -> str:
        """Return the sentence and all stacks, in one piece and with the rank on each line: all ranks write at once."""
        pid = os.getpid()
        sentence = (
            f"no progress for {self._stall_seconds / 60:g} min in: {self._phase}; the stacks of all threads follow. "
            "Ranks that wait for a stuck one say the same: look at the one whose main thread is in no collective. "
            f"This is process {pid} on {socket.gethostname()}, where `py-spy dump --native --pid {pid}` shows more. "
            "The run goes on waiting; --stall_minutes sets when this is said."
        )
        return "".join(f"rank {self._rank}: {line}\n" for line in [sentence, *_stacks()])


def _stacks() -> list[str]:
    """Return the other threads' stacks, read from memory alone: source files may lie on the very disk that hangs."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines = []
    for ident, top in sorted(sys._current_frames().items(), key=lambda item: names.get(item[0]) != "MainThread"):
        if ident != threading.get_ident():
            # Autograd's threads, in which backward hooks run, have no name in Python.
            lines.append(f"{names.get(ident, ident)}, most recent call first:")
            stack = traceback.walk_stack(top)
            lines += [f"  {frame.f_code.co_filename}:{line} in {frame.f_code.co_name}" for frame, line in stack]
    return lines
