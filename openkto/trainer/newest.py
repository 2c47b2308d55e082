"""Which checkpoint a run resumes from when a path was given and the run has newer checkpoints that continue it."""

from pathlib import Path
from typing import Any

from openkto.distributed import checkpoint_folder as layout
from openkto.distributed.checkpoint import Checkpoints
from openkto.distributed.choosing import Found
from openkto.distributed.state_file import read_state
from openkto.errors import CheckpointError


def find_checkpoint(checkpoints: Checkpoints, wanted: bool | str) -> Found | None:
    """Return the checkpoint to resume from, the same on every rank; all ranks must call it.

    If a path is wanted and the run has already continued it, with checkpoints of its own, the newest of those is
    it: a job that is started again with the same command would begin again at that path for ever.

    Raises:
        CheckpointError: see `Checkpoints.choose`.
    """
    is_continued = (
        isinstance(wanted, str) and checkpoints.strategy.gather_objects(_is_continued(checkpoints, wanted))[0]
    )
    return checkpoints.choose(True if is_continued else wanted)


def is_instead(found: Found, wanted: bool | str) -> bool:
    """Whether a checkpoint is another one than those that the given path stands for."""
    if not isinstance(wanted, str):
        return False
    place = layout.find(Path(wanted))
    named = [(place.root / name).resolve() for name in place.names]
    return bool(named) and found.folder.resolve() not in named


def _is_continued(checkpoints: Checkpoints, wanted: str) -> bool:
    """Whether the newest of a run's own checkpoints was made by a start that was given the same path, or later on.

    What is read here is compared with the manifests only when it is chosen.
    """
    newest = _newest_state(layout.Place(checkpoints.root, layout.checkpoints_in(checkpoints.root)))
    if newest is None:
        return False
    if newest["settings"].get("load_checkpoint") == wanted:
        return True
    place = layout.find(Path(wanted))
    given = _newest_state(place)
    if given is None or place.root.resolve() == checkpoints.root.resolve():
        return False
    own, other = newest["run"], given["run"]
    return bool(own["run_id"] == other["run_id"] and own["step"] >= other["step"])


def _newest_state(place: layout.Place) -> dict[str, Any] | None:
    if not place.names:
        return None
    try:
        return read_state(place.root / place.names[0])
    except CheckpointError:
        return None
