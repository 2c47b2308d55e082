"""Bounds on what strangers' files make a run do: time, size, and a library that gives up in its own way."""

import contextlib
import re
import signal
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

# A row of more characters than this has more tokens than any model takes, and would need gigabytes to be tokenised.
ROW_CHARACTERS = 5_000_000
# What takes milliseconds, such as rendering a row or matching a name; of the process's own time, not the clock's.
SECONDS = 10.0
KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class OutOfTimeError(Exception):
    """Something took longer than it may."""


@contextlib.contextmanager
def time_limit(seconds: float = SECONDS) -> Iterator[None]:
    """End what runs inside, Python code or a regular expression, once it has computed for so long.

    Signals reach the main thread only, so other threads have no limit.

    Raises:
        OutOfTimeError: inside.
    """

    def ring(number: int, frame: FrameType | None) -> None:
        raise OutOfTimeError(f"no end after {seconds:g} s")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    earlier = signal.signal(signal.SIGVTALRM, ring)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, earlier)


def match_in_time(pattern: str, texts: list[str], seconds: float = SECONDS) -> str | None:
    """Return why a stranger's pattern cannot be matched against the texts, or nothing where it can."""
    try:
        with time_limit(seconds):
            compiled = re.compile(pattern)
            for text in texts:
                compiled.fullmatch(text)
    except OutOfTimeError as error:
        return str(error)
    except (re.error, RecursionError, OverflowError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def is_panic(error: BaseException) -> bool:
    """Whether an exception is how a library written in Rust gives up, which is no Exception to Python."""
    return type(error).__name__ == "PanicException"


def kind_of_file(path: Path) -> str | None:
    """Return what a path is if reading it may never end, or nothing for files and folders.

    Raises:
        OSError: it cannot be looked at.
    """
    return KINDS.get(stat.S_IFMT(path.stat().st_mode))
