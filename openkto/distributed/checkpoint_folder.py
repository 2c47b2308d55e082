"""The folder of a run's checkpoints: which are complete, which is newest, which are to be deleted.

    global_step12/          DeepSpeed's files, state.json, arrays.safetensors and, as the last one, manifest.json
    global_step12_hf/       the same weights as a Hugging Face folder, with --save_hf_ckpt
    before_failed_step12/   of the state before a step that failed, with --save_failed_step; only a path resumes from it
    latest, best, finished  each a line with a checkpoint's name
    .saving/                a checkpoint that is being written; of a killed run it is debris

A checkpoint is complete when it bears its own name and its manifest agrees with its files. `latest` is for other
programs: it is never asked, except where a command names it.
"""

import contextlib
import json
import logging
import os
import re
import time
from pathlib import Path
from typing import NamedTuple

from openkto.distributed.manifest import MANIFEST, read_manifest
from openkto.errors import CheckpointError
from openkto.files import delete, flush_to_disk, numbered, write_flushed

log = logging.getLogger(__name__)

SCRATCH = ".saving"
REPLACED = ".replaced"
PROBE = ".probe-"
HF_SUFFIX = "_hf"
POINTERS = ("latest", "best", "finished")
# As `name_of` writes it: no leading zero, no digit of another script, no number beyond all bounds.
NAME = re.compile(r"global_step(0|[1-9][0-9]{0,14})")
LONGEST_NAME = 64
BEFORE_FAILED = "before_failed_step"
GIGABYTE = 10**9


def name_of(step: int) -> str:
    """Return the name of a step's checkpoint, which is DeepSpeed's tag."""
    return f"global_step{step}"


def step_of(name: str) -> int:
    """Return the step of a checkpoint's name."""
    found = NAME.fullmatch(name)
    assert found, f"no checkpoint's name: {name}"
    return int(found[1])


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
    replaced = written.with_name(f"{written.name}{REPLACED}")
    if final.exists():
        final.rename(replaced)
    try:
        written.rename(final)
    except OSError:
        if replaced.exists():
            replaced.rename(final)
        raise
    delete(replaced)


def clear(root: Path) -> None:
    """Delete what killed starts left beside the checkpoints; one that was being replaced gets its name back."""
    for replaced in (root / SCRATCH).glob(f"*{REPLACED}"):
        final = root / replaced.name.removesuffix(REPLACED)
        if not final.exists():
            replaced.rename(final)
    delete(root / SCRATCH)
    for debris in [*root.glob(f"{PROBE}*"), *(root / f"{pointer}.part" for pointer in POINTERS)]:
        delete(debris)


# ---- pointers -------------------------------------------------------------------------------------------------------


def point_to(root: Path, pointer: str, name: str, more: str = "") -> None:
    """Let `latest`, `best` or `finished` name a checkpoint; more may follow on a second line."""
    file, part = root / pointer, root / f"{pointer}.part"
    if file.is_dir():
        file.rename(numbered(file))  # somebody's folder, which no file can replace
    write_flushed(part, (f"{name}\n{more}" if more else name).encode())
    os.replace(part, file)
    flush_to_disk(root)


def pointed_to(root: Path, pointer: str) -> str | None:
    """Return the checkpoint that a pointer names, or None where it names none."""
    file = root / pointer
    try:
        content = file.read_bytes().partition(b"\n")[0][:LONGEST_NAME].decode().strip() if file.is_file() else ""
    except (OSError, ValueError):
        return None
    return content if NAME.fullmatch(content) else None


def finished_files(root: Path) -> dict[str, int] | None:
    """Return the files of the finished run's model with their sizes in bytes; None where they were not written down."""
    try:
        sizes = json.loads((root / "finished").read_bytes().partition(b"\n")[2])
    except (OSError, ValueError):
        return None
    return sizes if isinstance(sizes, dict) else None


def correct_pointers(root: Path, latest: str | None, best_step: int) -> None:
    """Let `latest` and `best` say what is so, where a kill or a failing disk came between a checkpoint and its names.

    Args:
        latest: None leaves that pointer as it is.
        best_step: of the run; negative where it keeps no best one.

    Raises:
        OSError: one cannot be written.
    """
    if latest is not None and pointed_to(root, "latest") != latest:
        point_to(root, "latest", latest)
    best = best_of(root, best_step)
    if best is not None and pointed_to(root, "best") != best:
        point_to(root, "best", best)


def best_of(root: Path, best_step: int) -> str | None:
    """Return the best checkpoint that is there: the run knows which, whatever the pointer says, unless it was lost."""
    known = name_of(best_step) if best_step >= 0 else None
    return known if known is not None and any(f.is_dir() for f in _folders(root, known)) else pointed_to(root, "best")


class Place(NamedTuple):
    """What a path in `--load_checkpoint` stands for."""

    root: Path  # the folder of checkpoints
    names: list[str]  # those that it may be, the newest first


def find(path: Path) -> Place:
    """Return what a path stands for: a checkpoint, a folder of them, a run's folder, or one of those with a pointer.

    A folder with a manifest is a checkpoint, whatever its name.
    """
    if (path / MANIFEST).is_file() or (path.is_dir() and NAME.fullmatch(path.resolve().name)):
        return Place(path.parent, [path.name])
    pointer = path.name if path.name in POINTERS and not path.is_dir() else None
    given = path.parent if pointer is not None else path
    for root in (given, given / "checkpoints"):
        if pointer is not None:
            name = pointed_to(root, pointer)
            names = [name] if name is not None and (root / name).is_dir() else []
        else:
            names = checkpoints_in(root)
        if names:
            return Place(root, names)
    return Place(path, [])


# ---- which have to go -----------------------------------------------------------------------------------------------


def rotate(root: Path, newest: str, max_number: int, max_gigabytes: float, best_step: int = -1) -> list[str]:
    """Delete the oldest until the rest is within both limits, never the newest nor the best; return the deleted.

    One that cannot be deleted is said, and stays until a later call.
    """
    sizes = {name: sum(folder_bytes(folder) for folder in _folders(root, name)) for name in held_in(root)}
    spared = (newest, best_of(root, best_step))
    deleted = []
    for name in [name for name in reversed(sizes) if name not in spared]:
        if len(sizes) <= max_number and sum(sizes.values()) <= max_gigabytes * GIGABYTE:
            break
        try:
            for folder in _folders(root, name):
                _delete_folder(folder, root / SCRATCH / f"{folder.name}.deleted")
        except OSError as error:
            log.warning("warning: checkpoint %s: could not be deleted (%s).", name, error.strerror)
            continue
        del sizes[name]
        deleted.append(name)
    return deleted


def _delete_folder(folder: Path, doomed: Path) -> None:
    """Rename a folder and delete it then: what a kill leaves half deleted must not look like a checkpoint."""
    if folder.exists():
        doomed.parent.mkdir(exist_ok=True)
        delete(doomed)
        folder.rename(doomed)
        delete(doomed)


def _folders(root: Path, name: str) -> tuple[Path, Path]:
    return root / name, root / f"{name}{HF_SUFFIX}"


def held_in(root: Path) -> list[str]:
    """Return the names of all checkpoints and of copies without one, the newest first."""
    names = checkpoints_in(root)
    copies = [entry.name.removesuffix(HF_SUFFIX) for entry in root.glob(f"global_step*{HF_SUFFIX}")]
    alone = [name for name in copies if NAME.fullmatch(name) and name not in names]
    return names + sorted(alone, key=step_of, reverse=True)


def set_aside(root: Path) -> str | None:
    """Move an earlier run's checkpoints into a numbered folder; return its name, or None where there are none."""
    names = held_in(root)
    if not names and not any(root.glob(f"{BEFORE_FAILED}*")):
        return None
    place = next(place for n in range(1, 10**6) if not (place := root / f"earlier-{n}").exists())
    place.mkdir()
    pointers = [root / pointer for pointer in POINTERS]
    folders = [folder for name in names for folder in _folders(root, name)]
    for path in [*folders, *root.glob(f"{BEFORE_FAILED}*"), *pointers]:
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
