"""Shows how far a run is: a bar on a terminal, plain log lines otherwise. Made on rank 0 only."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import TextIO

from tqdm import tqdm

logger = logging.getLogger(__name__)

# What is shown, and the metric that it is; one that the step does not have is left out.
SHOWN = {"loss": "loss", "margin": "rewards/margins", "samples/s": "samples_per_second"}

# Without a terminal a step has a line when so much of the run and so many seconds have passed since the last one, or
# the longer time. metrics.jsonl has them all.
SHARE_OF_STEPS = 0.01
SECONDS, SECONDS_AT_MOST = 5.0, 600.0


class Progress:
    """Shows the newest loss, reward margin and speed, and the time left.

    While the bar is open, log lines are written above it.
    """

    def __init__(self, total_steps: int, first_step: int = 0, stream: TextIO | None = None) -> None:
        """Start at `first_step`, the number of steps done before (0 in a new run); `stream` is stderr if not given."""
        self._total = total_steps
        self._first = first_step
        self._started = self._said_at = time.monotonic()
        self._said_step: int | None = None
        self._unsaid = ""  # the line of the newest step, where it has not been said
        self._bar: tqdm | None = None
        self._redirected = ExitStack()
        stream = stream or sys.stderr
        if stream.isatty():
            self._bar = tqdm(total=total_steps, initial=first_step, unit="step", file=stream)
            self._redirected.enter_context(_log_above_bar(stream))

    def update(self, step: int, values: Mapping[str, float | int | str]) -> None:
        """Show step number `step`, just finished, with its metrics."""
        shown = {label: f"{values[name]:.4g}" for label, name in SHOWN.items() if name in values}
        if self._bar is not None:
            self._bar.set_postfix(shown, refresh=False)
            self._bar.update(step - self._bar.n)
            return
        now = time.monotonic()
        seconds_a_step = (now - self._started) / max(1, step - self._first)
        left = timedelta(seconds=round(seconds_a_step * (self._total - step)))
        parts = [f"{label} {value}" for label, value in shown.items()] + [f"{left} left"]
        self._unsaid = f"step {step}/{self._total}: {', '.join(parts)}"
        if self._is_due(step, now):
            self._said_step, self._said_at = step, now
            self._say()

    def _is_due(self, step: int, now: float) -> bool:
        if self._said_step is None or step == self._total:
            return True
        seconds = now - self._said_at
        has_moved = step - self._said_step >= SHARE_OF_STEPS * self._total
        return (has_moved and seconds >= SECONDS) or seconds >= SECONDS_AT_MOST

    def _say(self) -> None:
        if self._unsaid:
            logger.info("%s", self._unsaid)
        self._unsaid = ""

    def close(self) -> None:
        """Leave the bar as it is, or say the last step, where a run ends early."""
        self._say()
        self._redirected.close()
        if self._bar is not None:
            self._bar.close()


class _AboveBar:
    """A terminal for log handlers: the bar is taken away, the lines are written, and the bar is drawn below them."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        tqdm.write(text, file=self._stream, end="")

    def flush(self) -> None:
        self._stream.flush()


@contextmanager
def _log_above_bar(stream: TextIO) -> Iterator[None]:
    """Let the log handlers of a terminal write above the bar there, in the block."""
    handlers = [h for h in logging.root.handlers if isinstance(h, logging.StreamHandler) and h.stream is stream]
    for handler in handlers:
        handler.setStream(_AboveBar(stream))
    try:
        yield
    finally:
        for handler in handlers:
            handler.setStream(stream)
