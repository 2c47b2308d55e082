"""Shows how far a run is: a bar on a terminal, plain log lines otherwise. Made only on rank 0."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import TextIO

from tqdm import tqdm

logger = logging.getLogger(__name__)

# What is shown, and the metric that it is; one that the step does not have is left out.
SHOWN = {"loss": "loss", "margin": "rewards/margins", "samples/s": "samples_per_second"}


class Progress:
    """Shows the newest loss, reward margin and speed, and the time left."""

    def __init__(self, total_steps: int, first_step: int = 0, stream: TextIO | None = None) -> None:
        """Start at `first_step`, the number of steps done before (0 in a new run); `stream` is stderr if not given."""
        self._total = total_steps
        self._first = first_step
        self._started = time.monotonic()
        stream = stream or sys.stderr
        self._bar = tqdm(total=total_steps, initial=first_step, unit="step", file=stream) if stream.isatty() else None

    def update(self, step: int, values: Mapping[str, float | int | str]) -> None:
        """Show step number `step`, just finished, with its metrics."""
        shown = {label: f"{values[name]:.4g}" for label, name in SHOWN.items() if name in values}
        if self._bar is not None:
            self._bar.set_postfix(shown, refresh=False)
            self._bar.update(step - self._bar.n)
            return
        seconds_a_step = (time.monotonic() - self._started) / max(1, step - self._first)
        left = timedelta(seconds=round(seconds_a_step * (self._total - step)))
        parts = [f"{label} {value}" for label, value in shown.items()] + [f"{left} left"]
        logger.info("step %d/%d: %s", step, self._total, ", ".join(parts))

    def close(self) -> None:
        """Leave the bar as it is."""
        if self._bar is not None:
            self._bar.close()
