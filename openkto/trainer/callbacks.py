"""What the caller of the library may have called while a run trains."""

from pathlib import Path
from typing import Protocol


class Callback(Protocol):
    """Told of what happens during `fit`; a class that derives from it need only write what it wants to hear.

    Each method has a `return`: a type checker takes a protocol's method without a body for one that must be written.

    Every rank calls its own, at the same places and with the same values, so it may use collectives; what is for one
    rank only, such as writing a file, it does where `strategy.rank` is 0. Its time is no part of a step's. What it
    raises ends the run.
    """

    def on_step(self, step: int, values: dict[str, float]) -> None:
        """Take in a step, after its update.

        Args:
            step: counted from 1.
            values: of this step, whatever `logging_steps`: its metrics over the whole global batch under the names of
                metrics.jsonl, without rates and memory.
        """
        return

    def on_evaluation(self, step: int, eval_set: str | None, values: dict[str, float]) -> None:
        """Take in one set's evaluation.

        Args:
            eval_set: None where there is one set only.
        """
        return

    def on_save(self, step: int, folder: Path) -> None:
        """Take in that a checkpoint is complete in this folder; it may be deleted when newer ones are."""
        return
