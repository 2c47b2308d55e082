"""The folder of a run's checkpoints: which are complete, which is newest, which have to go.

    global_step12/          DeepSpeed's files, state.json, arrays.safetensors and, as the last one, manifest.json
    global_step12_hf/       the same weights as a Hugging Face folder, with --save_hf_ckpt
    latest, best, finished  each a line with a checkpoint's name
    .saving/                a checkpoint that is being written; of a killed run it is debris

A checkpoint is complete when it bears its own name and its manifest agrees with its files. `latest` is for other
programs: it is never asked.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any, NamedTuple

from openkto.distributed.engine_files import FileRecord, unexpected_globals
from openkto.errors import CheckpointError
from openkto.files import flush_to_disk, hash_file, write_flushed

MANIFEST, STATE, ARRAYS, REFERENCE = "manifest.json", "state.json", "arrays.safetensors", "reference.safetensors"
SCRATCH = ".saving"
HF_SUFFIX = "_hf"
NAME = re.compile(r"global_step(\d+)")
GIGABYTE = 10**9


class Manifest(NamedTuple):
    """What a complete checkpoint holds, and when it was written; later ones have later times, whatever the clocks."""

    saved_at: float  # seconds since 1970
    files: dict[str, FileRecord]


def name_of(step: int) -> str:
    """Return the name of a step's checkpoint, which is DeepSpeed's tag."""
    return f"global_step{step}"


def step_of(name: str) -> int:
    """Return the step of a checkpoint's name."""
    found = NAME.fullmatch(name)
    assert found, f"no checkpoint's name: {name}"
    return int(found[1])


# ---- the manifest ---------------------------------------------------------------------------------------------------


def write_manifest(folder: Path, files: dict[str, FileRecord], saved_at: float) -> None:
    """Write the last file of a checkpoint."""
    content = {"saved_at": saved_at, "files": {name: list(record) for name, record in sorted(files.items())}}
    text = json.dumps(content | {"sha256": _digest(content)}, indent=1)
    write_flushed(folder / MANIFEST, text.encode())
    flush_to_disk(folder)


def read_manifest(folder: Path) -> Manifest:
    """Return what a checkpoint should hold.

    Raises:
        CheckpointError: there is none, or it was damaged.
    """
    try:
        content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        expected = content.pop("sha256")
        if _digest(content) != expected:
            raise ValueError
        files = {name: FileRecord(*record) for name, record in content["files"].items()}
        return Manifest(content["saved_at"], files)
    except FileNotFoundError:
        raise CheckpointError(f"{MANIFEST} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{MANIFEST} is damaged") from None


def problem_with(folder: Path, files: dict[str, FileRecord]) -> str | None:
    """Return what is wrong with the first of these files that is not as recorded, or None."""
    for name, record in files.items():
        path = folder / name
        try:
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
    added = [path.name for path in sorted(folder.glob("*.pt")) if path.name not in files]
    return f"{lacking[0]} was not written" if lacking else f"{added[0]} was added" if added else None


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


# ---- the folder -----------------------------------------------------------------------------------------------------


def checkpoints_in(root: Path) -> list[str]:
    """Return the names of all checkpoints, complete or not, the newest first."""

    def age(name: str) -> tuple[float, int]:
        try:
            return read_manifest(root / name).saved_at, step_of(name)
        except CheckpointError:
            return (root / name).stat().st_mtime, step_of(name)

    return sorted(_names_in(root), key=age, reverse=True)


def _names_in(root: Path) -> list[str]:
    if not root.is_dir():
        return []
    return [entry.name for entry in root.iterdir() if NAME.fullmatch(entry.name) and entry.is_dir()]


def next_time(root: Path) -> float:
    """Return now, or what is just later than every checkpoint that is there."""
    known = [time.time()]
    for name in _names_in(root):
        with contextlib.suppress(CheckpointError):
            known.append(read_manifest(root / name).saved_at + 0.001)
    return max(known)


def put_in_place(written: Path, final: Path) -> None:
    """Rename a complete folder to its own name; what had the name goes only then."""
    for path in written.rglob("*"):
        if path.is_file():
            flush_to_disk(path)
    replaced = written.with_name(f"{written.name}.replaced")
    if final.exists():
        final.rename(replaced)
    written.rename(final)
    flush_to_disk(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def point_to(root: Path, pointer: str, name: str) -> None:
    """Let `latest`, `best` or `finished` name a checkpoint."""
    part = root / f"{pointer}.part"
    write_flushed(part, name.encode())
    os.replace(part, root / pointer)
    flush_to_disk(root)


def pointed_to(root: Path, pointer: str) -> str | None:
    """Return the checkpoint that a pointer names."""
    file = root / pointer
    return file.read_text(encoding="utf-8").strip() if file.is_file() else None


def rotate(root: Path, newest: str, *, max_number: int, max_gigabytes: float) -> list[str]:
    """Delete the oldest until the rest is within both limits, never the newest nor the best; return the deleted."""
    sizes = {name: sum(folder_bytes(folder) for folder in _folders(root, name)) for name in _with_copies(root)}
    spared = (newest, pointed_to(root, "best"))
    deleted = []
    for name in [name for name in reversed(sizes) if name not in spared]:
        if len(sizes) <= max_number and sum(sizes.values()) <= max_gigabytes * GIGABYTE:
            break
        for folder in _folders(root, name):
            # Away first and deleted then: what a kill leaves half deleted must not look like a checkpoint.
            doomed = root / SCRATCH / f"{folder.name}.deleted"
            doomed.parent.mkdir(exist_ok=True)
            with contextlib.suppress(OSError):
                folder.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)
        del sizes[name]
        deleted.append(name)
    return deleted


def _folders(root: Path, name: str) -> tuple[Path, Path]:
    return root / name, root / f"{name}{HF_SUFFIX}"


def _with_copies(root: Path) -> list[str]:
    """Return all names of checkpoints and of copies without one, the newest first."""
    names = checkpoints_in(root)
    copies = [entry.name.removesuffix(HF_SUFFIX) for entry in root.glob(f"global_step*{HF_SUFFIX}")]
    alone = [name for name in copies if NAME.fullmatch(name) and name not in names]
    return names + sorted(alone, key=step_of, reverse=True)


def set_aside(root: Path) -> str | None:
    """Move an earlier run's checkpoints into a numbered folder; return its name, or None where there are none."""
    names = _with_copies(root)
    if not names:
        return None
    place = next(place for n in range(1, 10**6) if not (place := root / f"earlier-{n}").exists())
    place.mkdir()
    pointers = [root / name for name in ("latest", "best", "finished")]
    for path in [*(folder for name in names for folder in _folders(root, name)), *pointers]:
        if path.exists():
            path.rename(place / path.name)
    return place.name


def folder_bytes(folder: Path) -> int:
    """Return the size of all files in a folder; 0 where there is none."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.stat().st_size if path.is_file() else 0
    return total
