"""When a run ends, early or at its last step, and which step's model it leaves."""

import logging
from dataclasses import dataclass
from typing import Any

from openkto.config import HIGHER_IS_BETTER
from openkto.distributed.checkpoint import Checkpoints
from openkto.distributed.checkpoint_folder import name_of
from openkto.errors import CheckpointError
from openkto.report.records import EARLY_STOP
from openkto.trainer.run_state import RunState

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Ending:
    """The rules by which a run ends; what it has seen so far is in its `RunState`.

    Args:
        total_steps: of the schedule.
        stop_after_steps: a step to stop at earlier.
        keep_best: the metric of the first evaluation set whose best step is kept.
        patience: end after this many evaluations in a row without a better value of that metric.
    """

    total_steps: int
    stop_after_steps: int | None = None
    keep_best: str | None = None
    patience: int | None = None

    def note(self, run: RunState, results: dict[str, dict[str, float]]) -> bool:
        """Note an evaluation; return whether it is the best so far, so that `best` is to name this step."""
        if self.keep_best is None or not results or run.step == 0:
            return False
        value = next(iter(results.values())).get(self.keep_best)
        if value is None:
            return False
        is_higher_better = HIGHER_IS_BETTER[self.keep_best]
        is_better = run.best is None or (value > run.best if is_higher_better else value < run.best)
        if is_better:
            run.best, run.best_step = value, run.step
        run.evaluations_since_best = 0 if is_better else run.evaluations_since_best + 1
        return is_better

    def is_early(self, run: RunState) -> bool:
        """Whether the metric has not got better for so long that the run ends before its last step."""
        is_stale = self.patience is not None and run.evaluations_since_best >= self.patience
        return is_stale and run.step < self.total_steps

    def is_reached(self, run: RunState) -> bool:
        """Whether no step is left to make in this start."""
        return run.step >= min(self.total_steps, self.stop_after_steps or self.total_steps) or self.is_early(run)

    def is_before_last_step(self, run: RunState) -> bool:
        """Whether this start ends before the schedule does: the checkpoint there is due whatever `save_steps` says."""
        return self.is_reached(run) and run.step < self.total_steps

    def is_whole(self, run: RunState) -> bool:
        """Whether the run is done, and not merely this start of it."""
        return run.step >= self.total_steps or self.is_early(run)

    def reason(self, run: RunState) -> str:
        """Say why the run ended, for its summary."""
        if self.is_early(run):
            return (
                f"{EARLY_STOP}: {self.keep_best} was not better than {run.best:.4g} of step {run.best_step} in "
                f"{run.evaluations_since_best} evaluations in a row"
            )
        return "last step" if run.step >= self.total_steps else "stop_after_steps"


def load_best(checkpoints: Checkpoints, engine: Any, run: RunState, metric: str) -> None:
    """Give the engine the weights of the run's best step, at any ZeRO stage; all ranks must call it.

    Raises:
        CheckpointError: its checkpoint is not there, or not as it was written.
    """
    if run.best_step < 0:
        log.warning("warning: --load_best_at_end: no evaluation has been made yet; the model is that of the last step.")
        return
    if run.best_step != run.step:
        try:
            checkpoints.load_step(engine, run.best_step)
        except CheckpointError as error:
            raise CheckpointError(
                f"--load_best_at_end: the best step's checkpoint must be there; {error} The model of the last step is "
                f"in {checkpoints.root / name_of(run.step)}: openkto convert_checkpoint makes a model of it."
            ) from error
    log.info("the model is that of step %d of %d, the best by %s (%.4g)", run.best_step, run.step, metric, run.best)
