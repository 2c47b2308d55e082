"""The files that a run appends to, when it starts: carried on, cut back to a checkpoint, or set aside."""

import logging
import os
from pathlib import Path

from openkto.values import numbered

log = logging.getLogger(__name__)


def go_back(folder: Path, sizes: dict[str, int]) -> None:
    """Cut the records to what they held when a checkpoint was saved: the steps after it are made again."""
    for name, size in sizes.items():
        record = folder / name
        held = record.stat().st_size if record.is_file() else 0
        if held > size:
            os.truncate(record, size)
        elif held < size:
            log.warning("warning: %s: lines of earlier steps are missing (%d bytes of %d).", record, held, size)


def belongs_to(folder: Path, run_id: str) -> bool:
    """Whether metrics.jsonl was begun by the run, and not by another in the same folder."""
    record = folder / "metrics.jsonl"
    return record.is_file() and f'"run_id": "{run_id}"'.encode() in record.read_bytes().partition(b"\n")[0]


def set_aside(folder: Path) -> None:
    """Number an earlier run's records, so that a new run in the same folder neither mixes with them nor loses them."""
    for name in ("metrics.jsonl", "batches.jsonl", "tokens.jsonl", "tensorboard"):
        record = folder / name
        if record.exists():
            kept = record.rename(numbered(record))
            log.info("%s: an earlier run's records are kept as %s", folder, kept.name)
