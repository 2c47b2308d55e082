"""Limits of time and memory for work on untrusted files, and on libraries that panic."""

import contextlib
import ctypes
import os
import re
import resource
import signal
import stat
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from openkto.errors import ConfigError

# A row of more characters than this has more tokens than any model takes, and would need gigabytes to be tokenised.
ROW_CHARACTERS = 5_000_000
# What takes milliseconds, such as rendering a row or matching a name; of the process's own time, not the clock's.
SECONDS = 10.0
# What rendering a row takes at most: many times the longest row's text.
MEMORY_BYTES = 2**29
KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class OutOfTimeError(Exception):
    """Something took longer than it may."""


class TooLargeError(Exception):
    """Something took more memory than it may."""


@contextlib.contextmanager
def time_limit(seconds: float = SECONDS) -> Iterator[None]:
    """End what runs inside, Python code or a regular expression, once it has computed for so long.

    Signals reach the main thread only; in others Python code ends, and a regular expression does not.

    Raises:
        OutOfTimeError: inside.
    """

    def ring(number: int, frame: FrameType | None) -> None:
        raise OutOfTimeError(f"no end after {seconds:g} s")

    if threading.current_thread() is not threading.main_thread():
        try:
            with _watched(threading.get_ident(), seconds):
                yield
        except OutOfTimeError:
            raise OutOfTimeError(f"no end after {seconds:g} s") from None
        return
    earlier = signal.signal(signal.SIGVTALRM, ring)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, earlier)


@contextlib.contextmanager
def _watched(ident: int, seconds: float) -> Iterator[None]:
    """Let another thread raise OutOfTimeError in this one, between two instructions, once it has computed so long."""
    clock = time.pthread_getcpuclockid(ident)
    end = time.clock_gettime(clock) + seconds
    lock, done = threading.Lock(), threading.Event()

    def watch() -> None:
        while not done.wait(max(0.01, end - time.clock_gettime(clock))):
            with lock:
                if not done.is_set() and time.clock_gettime(clock) >= end:
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(OutOfTimeError))
                    return

    threading.Thread(target=watch, daemon=True, name="time limit").start()
    try:
        yield
    finally:
        with lock:
            done.set()


@contextlib.contextmanager
def memory_limit(more: int = MEMORY_BYTES) -> Iterator[None]:
    """End what runs inside when the process would need more than this many additional bytes; on Linux only.

    Raises:
        TooLargeError: inside.
    """
    if not sys.platform.startswith("linux"):
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = _address_space() + more
    resource.setrlimit(resource.RLIMIT_AS, (limit if soft == resource.RLIM_INFINITY else min(limit, soft), hard))
    try:
        yield
    except MemoryError:
        raise TooLargeError(f"more than {more / 2**20:.0f} MiB of memory") from None
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _address_space() -> int:
    """Return the bytes that this process has mapped."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")


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


def check_plain(flag: str, path: str) -> None:
    """Raise a ConfigError for a file of settings that is a pipe or a device, which may never end.

    Raises:
        OSError: it cannot be looked at.
    """
    kind = kind_of_file(Path(path))
    if kind is not None:
        raise ConfigError(f"{flag}: must be a plain file; got {path!r}, {kind}. Write it to a file.")


def kind_of_file(path: Path) -> str | None:
    """Return what a path is if reading it may never end, or nothing for files and folders.

    Raises:
        OSError: it cannot be looked at.
    """
    return KINDS.get(stat.S_IFMT(path.stat().st_mode))
