"""What a tracker is, and the names under which all of them show a run and its values."""

from collections.abc import Sequence
from datetime import datetime
from typing import Protocol

from openkto.config import OutputConfig
from openkto.report.samples import Line

Values = dict[str, float | int | str]


class Tracker(Protocol):
    """What a view of the metrics must do; it lives in one thread."""

    def log(self, kind: str, step: int, values: Values) -> None: ...

    def show_samples(self, step: int, lines: Sequence[Line]) -> None: ...

    def close(self) -> None: ...


def run_name(output: OutputConfig) -> str:
    """Return what the run is called."""
    return output.wandb_run_name or f"kto_{datetime.now():%m%dT%H:%M}"


def named(kind: str, values: Values) -> dict[str, float | int]:
    """Return the numbers under the names that trackers show: `train/loss`, `eval/loss` or `eval/<set>/loss`."""
    eval_set = values.get("eval_set")
    prefix = f"{kind}/{eval_set}" if eval_set else kind
    return {f"{prefix}/{name}": value for name, value in values.items() if not isinstance(value, str)}
