"""DeepSpeed checkpoint files: hashed on their way out, and read without running any code that they may hold.

Source: deepspeed/runtime/engine.py (`save_checkpoint`) of 0.19.8; its ranks wait for each other between the files.
"""

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from openkto.files import flush_to_disk, hash_file

# The classes that DeepSpeed's own files hold. A file with any other could run code when it is read.
TRUSTED = [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]


class FileRecord(NamedTuple):
    """What a complete file looks like."""

    size: int  # bytes
    sha256: str


class HashedFile:
    """A file to write into that hashes what it gets, and keeps a failure instead of raising it."""

    def __init__(self, path: Path) -> None:
        self.failure: OSError | None = None
        self.size, self._digest = 0, hashlib.sha256()
        self._file: BinaryIO | None = None
        with self._kept():
            self._file = path.open("wb")

    @contextlib.contextmanager
    def _kept(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.failure = self.failure or error

    def write(self, data: Any) -> int:
        """Write bytes; after a failure do nothing, as a serializer's own way out of one may abort the process."""
        if self._file is not None and self.failure is None:
            with self._kept():
                self._file.write(data)
                self._digest.update(data)
                self.size += len(data)
        return len(data)

    def flush(self) -> None:
        """Nothing to do: `close` flushes to the disk."""

    def close(self) -> FileRecord:
        """Put the file on the disk, past all caches, and return what it should look like there."""
        if self._file is not None:
            with self._kept():
                self._file.flush()
                os.fsync(self._file.fileno())
            with self._kept():
                self._file.close()
        return FileRecord(self.size, self._digest.hexdigest())


class RecordingCheckpointEngine(CheckpointEngine):
    """Writes this rank's files of one checkpoint, noting size and hash of each.

    It never raises while saving: DeepSpeed has barriers between its files, where the other ranks would wait for ever.
    What went wrong is in `failure`, for the ranks to compare afterwards.
    """

    def __init__(self) -> None:
        super().__init__()
        self.files: dict[str, FileRecord] = {}
        self.failure: str | None = None

    def create(self, info: CheckpointCommitInfo) -> None:
        """Nothing to prepare."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        try:
            os.makedirs(path, exist_ok=exist_ok)
        except OSError as error:
            self._note(error)

    def save(self, state_dict: Any, path: str) -> None:
        # The archive's own checksums cost as much as the writing, and the manifest has better ones.
        had_checksums = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)
        try:
            self.write(path, lambda file: torch.save(state_dict, file))
        finally:
            torch.serialization.set_crc32_options(had_checksums)

    def write(self, path: str | Path, serialize: Any) -> None:
        """Write one file through `serialize(file)` and note it."""
        if self.failure is not None:
            return
        file = HashedFile(Path(path))
        try:
            serialize(file)
        except Exception as error:
            # Whatever a serializer raises, such as no memory for a copy, must not keep this rank from the others.
            self._note(error)
        self.files[Path(path).name] = file.close()
        if file.failure is not None:
            self._note(file.failure)

    def write_path(self, path: Path, do: Callable[[Path], None]) -> None:
        """Let a library write one file by its path, and note it."""
        if self.failure is not None:
            return
        try:
            do(path)
            flush_to_disk(path)
            self.files[path.name] = FileRecord(path.stat().st_size, hash_file(path))
        except Exception as error:
            self._note(error)

    def _note(self, error: Exception) -> None:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        self.failure = self.failure or f"{type(error).__name__}: {reason}"

    def load(self, path: str, map_location: Any = None) -> Any:
        return read_file(path, map_location)

    def commit(self, info: CheckpointCommitInfo) -> bool:
        return True


def read_file(path: str | Path, map_location: Any = "cpu") -> Any:
    """Return what a DeepSpeed file holds; its tensors stay on the disk until they are touched.

    Nothing but tensors, plain containers and the `TRUSTED` classes is unpickled.
    """
    with torch.serialization.safe_globals(TRUSTED):
        return torch.load(path, map_location=map_location, weights_only=True, mmap=True)


def unexpected_globals(path: Path) -> list[str]:
    """Return the names in a pickle that are not `TRUSTED`, for which it must not be read."""
    trusted = {f"{known.__module__}.{known.__qualname__}" for known in TRUSTED}
    return sorted(set(torch.serialization.get_unsafe_globals_in_checkpoint(path)) - trusted)
