"""Clocks for measurements, without anything of OpenKTO: a program that it is compared with is timed by them, too."""

import functools
import time
from collections.abc import Callable
from typing import Any

CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}


def since_start(settings: dict[str, Any]) -> Callable[[], float]:
    """Return a clock of the seconds since this process was started.

    Args:
        settings: `clock`, one of `CLOCKS`, and `started`, when the parent started it, in seconds since the epoch.
    """
    if settings["clock"] == "processor":
        return time.process_time
    started: float = settings["started"]
    return lambda: time.time() - started


def time_calls(owner: type, method: str, clock: Callable[[], float]) -> list[float]:
    """Return a list that gets the seconds of each later call of a method."""
    original, spent = getattr(owner, method), []

    @functools.wraps(original)
    def timed(*values: Any, **named: Any) -> Any:
        began = clock()
        try:
            return original(*values, **named)
        finally:
            spent.append(clock() - began)

    setattr(owner, method, timed)
    return spent
