"""How many forwards of rows a reference in the loop makes in a start of a run, and so whether a cache costs no more."""

from typing import NamedTuple

from openkto.batches.loader import KTODataLoader
from openkto.config import RunConfig
from openkto.trainer.schedule import is_due, total_steps


class Stretch(NamedTuple):
    """The steps that a start makes: those after `first`, up to `last`, or where it may end early, to `surely`."""

    first: int
    last: int
    surely: int


def stretch_of(config: RunConfig, loader: KTODataLoader, first_step: int) -> Stretch:
    """Return the steps of a start that resumes from a step.

    Args:
        loader: of the training rows.
    """
    train, patience = config.train, config.checkpoint.early_stop_patience
    total = total_steps(len(loader), train.max_epochs, train.max_steps)
    last = min(total, train.stop_after_steps or total)
    if patience is None or (first_step > 0 and last <= first_step):
        return Stretch(first_step, last, last)
    # The first evaluation is the best so far; in a run that is resumed any may be the last.
    every = train.eval_steps if train.eval_steps > 0 else len(loader)
    evaluations = patience + 1 if first_step == 0 else 1
    return Stretch(first_step, last, min(last, (first_step // every + evaluations) * every))


def loop_forwards(config: RunConfig, loader: KTODataLoader, eval_loaders: list[KTODataLoader], made: Stretch) -> int:
    """Return the rows, matched and mismatched, that a reference in the loop surely runs in these steps."""
    rows = _rows_until(loader, made.surely) - _rows_until(loader, made.first)
    forwards = rows * _a_row(loader)
    return forwards + evaluations_in(config, len(loader), made) * sum(e.num_rows * _a_row(e) for e in eval_loaders)


def evaluations_in(config: RunConfig, steps_per_epoch: int, made: Stretch) -> int:
    """Return how often the sets are surely evaluated in these steps."""
    train = config.train
    at_start = int(train.eval_at_start and made.first == 0)
    if train.eval_steps == 0:
        return at_start
    due = sum(is_due(train.eval_steps, step, steps_per_epoch) for step in range(made.first + 1, made.surely + 1))
    # Also at the end, wherever that is.
    is_at_end = made.surely > made.first and not is_due(train.eval_steps, made.surely, steps_per_epoch)
    return at_start + due + int(is_at_end)


def _rows_until(loader: KTODataLoader, step: int) -> int:
    epochs, steps = divmod(step, max(len(loader), 1))
    return epochs * loader.num_rows + int(loader.bounds[steps])


def _a_row(loader: KTODataLoader) -> int:
    """Return the forwards of a row: with the mismatched completion where the loss takes that."""
    return 2 if loader.needs_mismatched else 1
