"""The files of a checkpoint and their manifest, read so that an untrusted checkpoint can do no harm.

A name in a manifest is one that a checkpoint of ours can have, and stands for a regular file in the checkpoint's own
folder: no path leads out of it, and nothing is opened that could run, hang or never end.
"""

import hashlib
import json
import math
import os
import re
import stat
from pathlib import Path
from typing import Any, NamedTuple

from openkto.distributed.engine_files import FileRecord, unexpected_globals
from openkto.errors import CheckpointError
from openkto.files import flush_to_disk, hash_file, write_flushed

MANIFEST, STATE, ARRAYS, REFERENCE = "manifest.json", "state.json", "arrays.safetensors", "reference.safetensors"
# To be raised when an earlier version would read a checkpoint wrongly. The first ones do not say a number.
FORMAT = 1
# DeepSpeed's own files beside ours.
FILE_NAME = re.compile(rf"[a-z0-9_]+_states\.pt|{re.escape(STATE)}|{re.escape(ARRAYS)}|{re.escape(REFERENCE)}", re.A)
LARGEST_JSON = 2**28  # bytes
# What reading something else as our JSON leads to.
NOT_OURS = (ValueError, KeyError, TypeError, AttributeError, RecursionError)


class NewerFormatError(CheckpointError):
    """A checkpoint that only a later version can read; to resume from an older one instead would lose what it holds."""


class Manifest(NamedTuple):
    """What a complete checkpoint holds, and when it was written; later ones have later times, whatever the clocks."""

    saved_at: float  # seconds since 1970
    files: dict[str, FileRecord]


def write_manifest(folder: Path, files: dict[str, FileRecord], saved_at: float) -> None:
    """Write the last file of a checkpoint."""
    records = {name: list(record) for name, record in sorted(files.items())}
    content = {"format": FORMAT, "saved_at": saved_at, "files": records}
    text = json.dumps(content | {"sha256": _digest(content)}, indent=1)
    write_flushed(folder / MANIFEST, text.encode())
    flush_to_disk(folder)


def read_manifest(folder: Path) -> Manifest:
    """Return what a checkpoint should hold.

    Raises:
        NewerFormatError: only a later version can read it.
        CheckpointError: there is none, or it is not as it was written.
    """
    try:
        content = read_json(folder / MANIFEST)
        expected = content.pop("sha256")
        if _digest(content) != expected:
            raise ValueError
        written_as = content.get("format", FORMAT)
        if type(written_as) is int and written_as > FORMAT:
            raise NewerFormatError(
                f"{folder}: must be of format {FORMAT} or earlier; got format {written_as}. Update OpenKTO, or name a "
                "checkpoint of this version."
            )
        files = {name: _record(name, record) for name, record in content["files"].items()}
        saved_at = float(content["saved_at"])
        if not math.isfinite(saved_at):
            raise ValueError
        return Manifest(saved_at, files)
    except FileNotFoundError:
        raise CheckpointError(f"{MANIFEST} is missing") from None
    except (OSError, *NOT_OURS):
        raise CheckpointError(f"{MANIFEST} is damaged") from None


def _record(name: str, record: list[Any]) -> FileRecord:
    if FILE_NAME.fullmatch(name) is None:
        raise CheckpointError(f"{MANIFEST} names {name[:60]!r}, which is no file of a checkpoint")
    size, sha256 = record
    if type(size) is not int or type(sha256) is not str:
        raise ValueError
    return FileRecord(size, sha256)


def read_json(path: Path) -> Any:
    """Return what a JSON file of a checkpoint holds.

    Raises:
        OSError, ValueError: it is not there, is no regular file, or holds something else.
    """
    reason = reason_not_to_open(path)
    if reason is not None:
        raise ValueError(reason)
    return json.loads(path.read_text(encoding="utf-8"))


def reason_not_to_open(path: Path) -> str | None:
    """Return why a path is nothing to read: a link, a folder, a device, a pipe, or JSON beyond all bounds; or None.

    Raises:
        OSError: it is not there.
    """
    found = os.lstat(path)
    if not stat.S_ISREG(found.st_mode):
        return "is no regular file"
    return "is too large" if path.suffix == ".json" and found.st_size > LARGEST_JSON else None


def check_files(folder: Path, rank: int = 0, world_size: int = 1) -> None:
    """Compare a rank's share of a checkpoint's files with its manifest.

    Raises:
        CheckpointError: one is not as it was written.
    """
    files = read_manifest(folder).files
    mine = {name: files[name] for name in sorted(files)[rank::world_size]}
    problem = problem_with_names(folder, files) or problem_with(folder, mine)
    if problem is not None:
        raise CheckpointError(problem)


def problem_with(folder: Path, files: dict[str, FileRecord]) -> str | None:
    """Return what is wrong with the first of these files that is not as recorded, or None."""
    for name, record in files.items():
        path = folder / name
        try:
            reason = reason_not_to_open(path)
            if reason is not None:
                return f"{name} {reason}"
            if path.stat().st_size != record.size:
                return f"{name} has {path.stat().st_size} bytes of {record.size}"
            if hash_file(path) != record.sha256:
                return f"{name} is not what was written"
        except OSError as error:
            return f"{name}: {error.strerror}"
        if name.endswith(".pt") and (reason := _reason_not_to_read(path)):
            return f"{name} {reason}"
    return None


def _reason_not_to_read(path: Path) -> str | None:
    try:
        names = unexpected_globals(path)
    except Exception:  # whatever reading something else as an archive or a pickle leads to
        return "is no file of a checkpoint"
    return f"holds {names[0]}, which could run code" if names else None


def problem_with_names(folder: Path, files: dict[str, FileRecord]) -> str | None:
    """Return which file a checkpoint lacks, or has beyond those that were written, or None."""
    lacking = [name for name in (STATE, ARRAYS) if name not in files]
    # All that would be read though nobody compared it.
    present = [*sorted(folder.glob("*.pt")), folder / REFERENCE]
    added = [path.name for path in present if os.path.lexists(path) and path.name not in files]
    return f"{lacking[0]} was not written" if lacking else f"{added[0]} was added" if added else None


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
