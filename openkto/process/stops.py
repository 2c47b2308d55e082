"""Requests to stop: SIGTERM, SIGINT, SIGUSR1, SIGHUP (a closed terminal) and the time limit `--max_time`.

In training a signal only leaves a note, `StopRequest.reason`; the loop asks `is_due()` once a step, saves and ends.
Before training there is nothing to save, so a signal ends the command at once.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

from openkto.errors import NoStepError, StopError
from openkto.process.processes import process

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
SECONDS_TO_HANDLE = 5.0
AFTER_SECOND_SIGINT = 128 + signal.SIGINT  # the status that a shell shows for it


class StopRequest:
    """Whether this process was asked to stop. One a process, made where a command starts.

        with StopRequest() as stop:
            stop.max_seconds = ...
            ...                       # start-up
            stop.begin_training()
            for each step: ...        # until stop.is_due() on any rank

    A first SIGINT gives the second one its default action, so Ctrl-C twice ends the process at once.

    Args:
        max_seconds: the time limit, counted from the start of the process; None is no limit.
    """

    def __init__(self, max_seconds: float | None = None) -> None:
        self._noted: set[str] = set()  # signals
        self.reason: str | None = None  # what was asked first: "SIGTERM", "the time limit --max_time 0:01:00:00"
        self.max_seconds = max_seconds
        self._started = time.monotonic() - process_age()
        self._is_training, self._when = False, ""
        self._earlier: dict[signal.Signals, Any] = {}
        self._earlier_wakeup_fd = -1
        self._wakeup_fd = -1

    # ---- what the loop asks -----------------------------------------------------------------------------------------

    def begin_training(self, when: str = "after this step") -> None:
        """From now on a signal leaves a note instead of ending the command.

        A time limit that is over already does not count here: the run makes its one step and saves, or it would
        never get on.

        Args:
            when: when the command stops, to say so at a signal.

        Raises:
            StopError, KeyboardInterrupt: a signal came before, and some library swallowed the exception.
        """
        self._when, self._is_training = when, True
        if self.reason is not None:
            raise self._before_training()

    @contextlib.contextmanager
    def noting(self, when: str) -> Iterator[None]:
        """Inside, a signal leaves a note as in training, for work before it that all ranks must leave together.

        Raises:
            StopError, KeyboardInterrupt: a signal came and nothing acted on its note.
        """
        self.begin_training(when)
        try:
            yield
        finally:
            self._is_training = False
        if self.reason is not None:
            raise self._before_training()

    def is_due(self) -> bool:
        """Whether to stop after this step: a signal came, or the time limit is over."""
        if self.reason is None and self.max_seconds is not None and self._seconds() >= self.max_seconds:
            self.reason = f"the time limit --max_time {duration(self.max_seconds)}"
        return self.reason is not None

    def _seconds(self) -> float:
        return time.monotonic() - self._started

    # ---- signals ----------------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Handle the signals from now on; does nothing outside the main thread, where Python has none."""
        if threading.current_thread() is not threading.main_thread() or self._earlier:
            return
        # nohup has the process ignore that its terminal is closed.
        ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else set()
        self._earlier = {number: signal.signal(number, self._handle) for number in SIGNALS if number not in ignored}
        # Python runs a handler only when the main thread is back from C, and a collective that waits for a stuck rank
        # never is. The interpreter's own C handler writes each signal's number to this pipe at once.
        read_fd, self._wakeup_fd = os.pipe()
        os.set_blocking(self._wakeup_fd, False)
        self._earlier_wakeup_fd = signal.set_wakeup_fd(self._wakeup_fd, warn_on_full_buffer=False)
        threading.Thread(target=self._end_from_outside, args=(read_fd,), daemon=True, name="signals").start()
        # A data worker that is ended with SIGTERM must end, and must not write to our pipe.
        os.register_at_fork(after_in_child=self.restore)

    def restore(self) -> None:
        """Put the earlier handlers back."""
        if not self._earlier:
            return
        signal.set_wakeup_fd(self._earlier_wakeup_fd)
        os.close(self._wakeup_fd)
        for number, earlier in self._earlier.items():
            # None is a handler that some C library had set; Python cannot put it back.
            signal.signal(number, signal.SIG_DFL if earlier is None else earlier)
        self._earlier = {}

    def __enter__(self) -> "StopRequest":
        self.install()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.restore()
        was_stopped = self.reason is not None and not self._is_training
        if was_stopped and isinstance(error, Exception) and not isinstance(error, StopError):
            # A library turned the stop into an error of its own, such as "cannot load the model".
            raise self._before_training() from error

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Note the signal. It may come in the middle of anything, so no lock is taken and nothing is logged."""
        is_first = self.reason is None
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        self._note(signal.Signals(number).name)
        # Once: the second of two signals would break into the way out that the first one took.
        if is_first and not self._is_training:
            raise self._before_training()

    def _note(self, name: str) -> None:
        if name not in self._noted:
            self._noted.add(name)
            self.reason = self.reason or name
            when = self._when if self._is_training else "before the first step"
            with contextlib.suppress(OSError):
                os.write(2, f"rank {os.environ.get('RANK', '0')}: {name}: stopping {when}\n".encode())

    def _end_from_outside(self, read_fd: int) -> None:
        """End the process where its main thread is not there to: at a second SIGINT, or long before the first step.

        In training leave the note: the watchdog acts on it where the main thread waits for a rank that does not come.
        """
        interrupts = 0
        while number := os.read(read_fd, 1):
            if number[0] not in SIGNALS:  # each handled signal's number comes here, a time limit's too
                continue
            interrupts += number[0] == signal.SIGINT
            if interrupts == 2:
                os._exit(AFTER_SECOND_SIGINT)
            if self._is_training:
                self._note(signal.Signals(number[0]).name)
            elif number[0] != signal.SIGINT:
                timer = threading.Timer(SECONDS_TO_HANDLE, self._end_if_unhandled, (signal.Signals(number[0]).name,))
                timer.daemon = True
                timer.start()
        os.close(read_fd)

    def _end_if_unhandled(self, name: str) -> None:
        """End a process that waits in C for other ranks to come, which does not let Python's handlers run."""
        if self.reason is None and not self._is_training:
            self.reason = name
            os.write(2, f"stopped: {self._before_training()}\n".encode())
            os._exit(NoStepError.exit_code)

    def _before_training(self) -> BaseException:
        if self.reason == "SIGINT":
            return KeyboardInterrupt()
        return NoStepError(
            f"{self.reason}: the run was asked to stop before its first step; nothing was lost. Start the same command "
            "again."
        )


def process_age() -> float:
    """Return the seconds since this process started, imports included; 0 where the system does not say."""
    own = process(os.getpid())
    if own is None:
        return 0.0
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - own.start_ticks / os.sysconf("SC_CLK_TCK"))


def duration(seconds: float) -> str:
    """Say seconds as `--max_time` is given."""
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days}:{hours:02}:{minutes:02}:{seconds:02}"
