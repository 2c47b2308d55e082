"""Shows how far a run is: a bar on a terminal, plain log lines otherwise. Made only on rank 0.

A run's log is to fit a screen: of many steps and evaluations some are logged at INFO and the others at DEBUG, which
`--verbose` shows. metrics.jsonl has all of them.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import TextIO

from tqdm import tqdm

logger = logging.getLogger(__name__)

# What is shown, and the metric that it is; one that the step does not have is left out.
SHOWN = {"loss": "loss", "margin": "rewards/margins", "samples/s": "samples_per_second"}
SHOWN_OF_EVALUATION = {
    "loss": "loss",
    "margin": "rewards/margins",
    "auc": "rewards/auc",
    "accuracy": "rewards/accuracy",
    "kl": "kl",
}
STEP_LINES, EVALUATION_LINES = 20, 6  # of a run of any length, with one more for its first
LONGEST_SILENCE = 1800.0  # seconds


class Thinning:
    """Says which of many moments are shown: the first, the last, and `lines` between; more where they take long."""

    def __init__(self, total_steps: int, lines: int) -> None:
        self._total, self._lines = total_steps, lines
        self._step: int | None = None  # that was shown last
        self._time = 0.0

    def level(self, step: int, now: float) -> int:
        """Return the level at which a step is logged; it then counts as shown."""
        is_shown = (
            self._step is None
            or step >= self._total
            or (step - self._step) * self._lines >= self._total
            or now - self._time >= LONGEST_SILENCE
        )
        if not is_shown:
            return logging.DEBUG
        self._step, self._time = step, now
        return logging.INFO


class Progress:
    """Shows the newest loss, reward margin and speed, the time left, and evaluations."""

    def __init__(self, total_steps: int, first_step: int = 0, stream: TextIO | None = None) -> None:
        """Start at `first_step`, the number of steps done before (0 in a new run); `stream` is stderr if not given."""
        self._total = total_steps
        self._first = first_step
        self._started = time.monotonic()
        self._steps = Thinning(total_steps, STEP_LINES)
        self._evaluations: dict[str | None, Thinning] = {}
        stream = stream or sys.stderr
        self._bar = tqdm(total=total_steps, initial=first_step, unit="step", file=stream) if _fits_bar(stream) else None

    def update(self, step: int, values: Mapping[str, float | int | str]) -> None:
        """Show step number `step`, just finished, with its metrics."""
        shown = _shown(SHOWN, values)
        if self._bar is not None:
            self._bar.set_postfix(shown, refresh=False)
            self._bar.update(step - self._bar.n)
            return
        now = time.monotonic()
        seconds_a_step = (now - self._started) / max(1, step - self._first)
        left = timedelta(seconds=round(seconds_a_step * (self._total - step)))
        text = ", ".join([*_named(shown), f"{left} left"])
        logger.log(self._steps.level(step, now), "step %d/%d: %s", step, self._total, text)

    def evaluation(self, eval_set: str | None, step: int, values: Mapping[str, float]) -> None:
        """Show what the evaluation of a set at a step gave."""
        thinning = self._evaluations.setdefault(eval_set, Thinning(self._total, EVALUATION_LINES))
        of_set = f" of {eval_set}" if eval_set else ""
        text = ", ".join(_named(_shown(SHOWN_OF_EVALUATION, values)))
        logger.log(thinning.level(step, time.monotonic()), "evaluation%s at step %d: %s", of_set, step, text)

    def close(self) -> None:
        """Leave the bar as it is."""
        if self._bar is not None:
            self._bar.close()


def _fits_bar(stream: TextIO) -> bool:
    """Return whether a bar can be seen: some terminals, of containers and pipes, say that they have no columns."""
    if not stream.isatty():
        return False
    try:
        return os.get_terminal_size(stream.fileno()).columns > 0
    except (OSError, ValueError):
        return True


def _shown(names: Mapping[str, str], values: Mapping[str, float | int | str]) -> dict[str, str]:
    return {label: f"{values[name]:.4g}" for label, name in names.items() if name in values}


def _named(shown: Mapping[str, str]) -> list[str]:
    return [f"{label} {value}" for label, value in shown.items()]
