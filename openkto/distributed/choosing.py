"""Which checkpoint a run resumes from: chosen by all ranks together, complete, and written by OpenKTO."""

import logging
from pathlib import Path
from typing import Any, NamedTuple

from openkto.distributed import checkpoint_folder as layout
from openkto.distributed.agreement import Ranks, first_problem, reason_of
from openkto.distributed.manifest import NewerFormatError, check_files, read_manifest
from openkto.distributed.state_file import read_state
from openkto.errors import CheckpointError

log = logging.getLogger(__name__)


class Found(NamedTuple):
    """A complete checkpoint to resume from."""

    folder: Path
    state: dict[str, Any]


def choose(root: Path, strategy: Ranks, wanted: bool | str) -> Found | None:
    """Return the checkpoint to resume from, the same on every rank, or None for none; all ranks must call it.

    Args:
        root: the run's own folder of checkpoints.
        wanted: True for the newest there that is complete; or what `checkpoint_folder.find` understands, or the name of
            one of the run's own pointers, for that one and no other.

    Raises:
        CheckpointError: the one that is wanted is not complete, or there are some and none is, or one is of a later
            version.
    """
    listed: list[Path] = []
    failure = reason_of(lambda: listed.extend(_candidates(root, wanted))) if strategy.rank == 0 else None
    failure = first_problem(strategy, failure)
    if failure is not None:
        raise CheckpointError(f"--load_checkpoint: {failure}")
    candidates: list[Path] = strategy.gather_objects(listed)[0]
    problems, share = [], (strategy.rank, strategy.world_size)
    for folder in candidates:
        problem = first_problem(strategy, reason_of(lambda: check_files(folder, *share)))  # noqa: B023 (called now)
        if problem is None:
            state: dict[str, Any] = {}
            reason = reason_of(lambda: state.update(read_state(folder))) if strategy.rank == 0 else None  # noqa: B023
            problem = first_problem(strategy, reason)
        if problem is None:
            return Found(folder, strategy.gather_objects(state)[0])
        problems.append(f"{folder}: is not complete: {problem}.")
        if strategy.rank == 0:
            log.warning("warning: %s", problems[-1])
    if isinstance(wanted, str):
        got = problems[0] if problems else f"{wanted}: no checkpoint is there."
        raise CheckpointError(f"--load_checkpoint: must be a complete checkpoint; got {got} Name another.")
    if problems:
        raise CheckpointError(
            f"--load_checkpoint: no checkpoint in {root} is complete; the newest, {problems[0]} "
            "Leave --load_checkpoint out to start from the beginning; these are then kept aside."
        )
    return None


def _candidates(root: Path, wanted: bool | str) -> list[Path]:
    """Return the folders that may be meant, the newest first.

    Raises:
        CheckpointError: one of them is of a later version's format.
    """
    place = layout.find(Path(wanted)) if isinstance(wanted, str) else layout.Place(root, layout.checkpoints_in(root))
    if not place.names and wanted in layout.POINTERS:
        place = layout.find(root / str(wanted))
    folders = [place.root / name for name in place.names]
    for folder in folders:
        try:
            read_manifest(folder)
        except NewerFormatError:
            raise
        except CheckpointError:
            continue  # it is said when its turn comes
    return folders
