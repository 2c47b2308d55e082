"""How many forwards of rows a reference in the loop makes in a start of a run: what a cache is compared with."""

from openkto.batches.loader import KTODataLoader
from openkto.config import RunConfig
from openkto.trainer.schedule import is_due, total_steps


def loop_forwards(config: RunConfig, loader: KTODataLoader, eval_loaders: list[KTODataLoader]) -> int:
    """Return the rows, matched and mismatched, that a reference in the loop surely runs in a run's first start.

    Args:
        loader: of the training rows.
        eval_loaders: of the sets that are evaluated on.
    """
    steps = sure_steps(config, loader)
    epochs, rest = divmod(steps, max(len(loader), 1))
    rows = epochs * loader.num_rows + int(loader.bounds[rest])
    evaluated = sum(e.num_rows * _forwards_a_row(e) for e in eval_loaders)
    return rows * _forwards_a_row(loader) + evaluations_in(config, len(loader), steps) * evaluated


def sure_steps(config: RunConfig, loader: KTODataLoader) -> int:
    """Return how many steps the first start makes at least: it may end early."""
    train, patience = config.train, config.checkpoint.early_stop_patience
    total = total_steps(len(loader), train.max_epochs, train.max_steps)
    last = min(total, train.stop_after_steps or total)
    if patience is None:
        return last
    # The first evaluation is the best so far.
    every = train.eval_steps if train.eval_steps > 0 else len(loader)
    return min(last, (patience + 1) * every)


def evaluations_in(config: RunConfig, steps_per_epoch: int, steps: int) -> int:
    """Return how often the sets are evaluated in the first steps, of which the last ends the start."""
    train = config.train
    at_start = int(train.eval_at_start)
    if train.eval_steps == 0:
        return at_start
    due = sum(is_due(train.eval_steps, step, steps_per_epoch) for step in range(1, steps + 1))
    return at_start + due + int(not is_due(train.eval_steps, steps, steps_per_epoch))


def _forwards_a_row(loader: KTODataLoader) -> int:
    """Return the forwards of a row: with the mismatched completion where the loss takes that."""
    return 2 if loader.needs_mismatched else 1
