"""Returns free pages of the C heap, which holds CPU tensors, to the system."""

import ctypes
from collections.abc import Callable

# glibc's; other C libraries have none.
_TRIM: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)


def give_back_free_pages() -> None:
    """Return to the system the pages of the heap that hold nothing.

    glibc keeps what was freed, except at the heap's end. Each micro-batch has another number of tokens, so its blocks
    do not fit where the last one's were, and pages that hold nothing add up.
    """
    if _TRIM is not None:
        _TRIM(0)
