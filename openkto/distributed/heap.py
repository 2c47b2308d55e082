"""The C library's heap, where tensors on a CPU live."""

import ctypes
from collections.abc import Callable


def _find_trim() -> Callable[[int], int] | None:
    """Return glibc's malloc_trim; other C libraries have none."""
    trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim


_TRIM = _find_trim()


def give_back_free_pages() -> None:
    """Return to the system the pages of the heap that hold nothing.

    glibc keeps what was freed, but for the heap's end. Each micro-batch has another number of tokens, so its blocks
    do not fit where the last one's were, and pages that hold nothing add up.
    """
    if _TRIM is not None:
        _TRIM(0)
