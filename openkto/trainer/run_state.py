"""The state of a run: steps, rows consumed, and what a checkpoint keeps of it."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


def known_fields(record: type, values: dict[str, Any]) -> dict[str, Any]:
    """Return what another version saved of a record, of the fields that this one has; others have their defaults."""
    return {field.name: values[field.name] for field in dataclasses.fields(record) if field.name in values}


@dataclass
class RunState:
    """What the loop counts. With the engine, the random generators and the open log line it is the whole run."""

    step: int = 0  # steps done
    updates: int = 0  # of them, those that the optimizer applied
    consumed_samples: int = 0
    is_evaluated: bool = True  # whether the evaluation that is due after `step` has been made
    best: float | None = None  # the best value so far of the metric to keep
    best_step: int = -1
    evaluations_since_best: int = 0  # in a row without a better value of that metric
    run_id: str = ""  # the same over all starts of a run
    is_cached: bool | None = None  # whether the reference's values are from the cache; None in older checkpoints
    held_tokens: int | None = None  # see `Layout`; an older checkpoint's run goes on in its own order
    log_ratio_sum: float = 0.0  # nats: of the rows of all steps done, for a loss that is relative to their mean
    log_ratio_rows: int = 0

    @property
    def shift(self) -> float | None:
        """The mean log-ratio of the rows of all steps done, in nats; None where there was none."""
        return self.log_ratio_sum / self.log_ratio_rows if self.log_ratio_rows else None

    def count(self, rows: int, log_ratio_N: NDArray[np.float64] | None, is_applied: bool) -> None:
        """Count a step that was made.

        Args:
            log_ratio_N: nats: of the step's rows; None for a loss that is not relative to their mean.
            is_applied: whether the optimizer applied its update.
        """
        self.updates += is_applied
        self.consumed_samples += rows
        if log_ratio_N is not None:
            self.log_ratio_sum += float(log_ratio_N.sum())
            self.log_ratio_rows += rows

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` reads."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "RunState":
        """Return the state that was saved; what an older version did not save is as at the start."""
        return cls(**known_fields(cls, values))
