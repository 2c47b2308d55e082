"""Keeps the C heap, which holds CPU tensors, from growing by its holes.

glibc keeps what was freed, except at the heap's end, and most of it serves the next micro-batch. Pages that go back to
the system are cleared before they return, which takes its time if all go after each micro-batch. But each
micro-batch has another number of tokens, so its blocks do not always fit where the last one's were, and holes add up.
So free pages go back once they are more than a part of what a step has in use.

Units:   bytes.
"""

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator
from typing import Any

HOLES = 0.5  # of the most that was in use: so much more may lie in holes


class _Statistics(ctypes.Structure):
    """What glibc says of its heap: `struct mallinfo2` of malloc.h."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


# glibc's, the second from 2.33 on; other C libraries have none.
_C: Any = ctypes.CDLL(None)
_TRIM: Callable[[int], int] | None = getattr(_C, "malloc_trim", None)
_INFO: Any = getattr(_C, "mallinfo2", None)
if _INFO is not None:
    _INFO.restype = _Statistics


class Heap:
    """The heap of a process that trains; where it cannot be asked, its free pages go back each time."""

    def __init__(self) -> None:
        self.most_in_use = 0
        self.elsewhere: int | None = None  # memory of the process that its heap does not know of

    @contextlib.contextmanager
    def during_backward(self) -> Iterator[None]:
        """Note what is in use before a backward pass, where a step has the most, and look at the holes after it."""
        if _INFO is None:
            yield
            give_back_free_pages()
            return
        if self.elsewhere is None:
            give_back_free_pages()
            self.elsewhere = _resident() - _in_use()
        self.most_in_use = max(self.most_in_use, _in_use())
        yield
        if _resident() - self.elsewhere > (1 + HOLES) * self.most_in_use:
            give_back_free_pages()


def give_back_free_pages() -> None:
    """Return to the system the pages of the heap that hold nothing."""
    if _TRIM is not None:
        _TRIM(0)


def _in_use() -> int:
    found = _INFO()
    return int(found.uordblks + found.hblkhd)


def _resident() -> int:
    """Return the memory that the process has, without what it shares with files and with other processes."""
    with open("/proc/self/statm", "rb") as file:
        _, resident, shared, *_ = map(int, file.read().split())
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")
