"""What is done with files in more than one place: read in blocks, hashed, put on the disk past all caches."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

BLOCK_BYTES = 2**20


def blocks(path: Path) -> Iterator[bytes]:
    """Yield a file's content in pieces that memory holds."""
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            yield block


def hash_file(path: Path) -> str:
    """Return a file's sha256."""
    digest = hashlib.sha256()
    for block in blocks(path):
        digest.update(block)
    return digest.hexdigest()


def flush_to_disk(path: Path) -> None:
    """Let a file's content, or the names in a folder, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_flushed(path: Path, content: bytes) -> None:
    """Write a file past all caches."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
