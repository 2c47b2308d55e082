"""File helpers used in several places: reading in blocks, hashing, flushing to disk.

What is written under another name first has one that says who writes it (`scratch_name`), so that a later start can
tell what a killed writer left (`delete_leftovers`).
"""

import contextlib
import hashlib
import itertools
import os
import re
import shutil
import socket
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from openkto.process.processes import Process, process

BLOCK_BYTES = 2**20
SCRATCH_NAME = re.compile(r".+\.(?P<host>[^.]+)\.(?P<pid>\d+)-(?P<start>\d+)-[0-9a-f]{8}\.part")
# What another machine's process may still be writing is not touched for this long after its last change.
SECONDS_OF_A_STRANGER = 24 * 3600.0


def blocks(path: Path) -> Iterator[bytes]:
    """Yield a file's content in pieces that memory holds."""
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            yield block


def hash_file(path: Path, new: Callable[[], Any] = hashlib.sha256) -> str:
    """Return a file's hash, sha256 unless another is asked for."""
    digest = new()
    for block in blocks(path):
        digest.update(block)
    return str(digest.hexdigest())


def flush_to_disk(path: Path) -> None:
    """Let a file's content, or the names in a folder, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_files(folder: Path) -> None:
    """Let all that is in a folder, its folders included, survive a power cut."""
    for path in [*folder.rglob("*"), folder]:
        if path.is_file() or path.is_dir():
            with contextlib.suppress(PermissionError):  # somebody else's
                flush_to_disk(path)


def write_flushed(path: Path, content: bytes) -> None:
    """Write a file past all caches."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


# ---- what killed writers leave ---------------------------------------------------------------------------------------


def scratch_name(stem: str) -> str:
    """Return a new name to write under; what is complete is then renamed to its own."""
    own = process(os.getpid())
    return f"{stem}.{_this_host()}.{os.getpid()}-{own.start_ticks if own else 0}-{uuid.uuid4().hex[:8]}.part"


def delete_leftovers(folder: Path) -> None:
    """Delete what killed writers left in a folder under a `scratch_name`; what cannot be deleted stays."""
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            found = SCRATCH_NAME.fullmatch(path.name)
            if found is not None and not _may_be_written(path, found):
                delete(path)


def make_writable(folder: Path) -> None:
    """Make a folder and see that files can be written there; raises OSError where they cannot."""
    folder.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=folder).close()


def delete(path: Path) -> None:
    """Delete a file, or a folder with all that is in it; what cannot be deleted stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def _may_be_written(path: Path, name: re.Match[str]) -> bool:
    """Whether the writer of a scratch file lives, or may live, as processes of other machines cannot be asked after."""
    if name["host"] == _this_host():
        return Process(int(name["pid"]), int(name["start"])).is_running()
    changes = [path.lstat().st_mtime, *(inner.lstat().st_mtime for inner in path.rglob("*"))]
    return time.time() - max(changes) < SECONDS_OF_A_STRANGER


def _this_host() -> str:
    """Return a name for this machine's processes; those of a container have numbers of their own."""
    try:
        numbers_of = os.stat("/proc/self/ns/pid").st_ino
    except OSError:  # no Linux
        numbers_of = 0
    return f"{socket.gethostname().replace('.', '_')}-{numbers_of}"


def numbered(path: Path) -> Path:
    """Return the first free path with a number before the suffix: metrics.jsonl gives metrics.1.jsonl."""
    candidates = (path.with_name(f"{path.stem}.{n}{path.suffix}") for n in itertools.count(1))
    return next(candidate for candidate in candidates if not candidate.exists())
