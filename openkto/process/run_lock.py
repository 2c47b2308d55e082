"""One run at a time in a folder: a lock file names the host, the process and the job of the run that holds it.

The process that holds a lock touches its file every few seconds, so that other hosts see that it lives. Whoever finds a
lock judges it: a process of this host is looked up, that of another host must touch the file while one watches. What is
left of a dead run is taken over. flock only orders those who judge at the same time; a lock does not rest on it, since
not every shared disk has it and children inherit it.
"""

import contextlib
import dataclasses
import errno
import fcntl
import json
import logging
import os
import socket
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from openkto.errors import ConfigError
from openkto.process.processes import Process, number_space, process

log = logging.getLogger(__name__)

NAME = ".lock"
BEAT_SECONDS = 10.0
SILENT_SECONDS = 60.0  # a run of another host that has not touched its lock for so long is dead
HAS_NO_FLOCK = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)


@dataclass(frozen=True)
class Owner:
    """Who holds a lock, as its file says."""

    host: str
    pid: int
    start_ticks: int
    number_space: str  # where `pid` means something
    job: str  # SLURM's number, or nothing
    since: str
    token: str  # of this lock and no other

    @classmethod
    def this_process(cls) -> "Owner":
        """Return this process as an owner."""
        own = process(os.getpid())
        return cls(
            socket.gethostname(),
            os.getpid(),
            own.start_ticks if own else 0,
            number_space(),
            os.environ.get("SLURM_JOB_ID", ""),
            time.strftime("%Y-%m-%d %H:%M:%S"),
            uuid.uuid4().hex,
        )

    def __str__(self) -> str:
        job = f", SLURM job {self.job}" if self.job else ""
        return f"process {self.pid} on {self.host}{job}, since {self.since}"


class RunLocks:
    """The locks that this process holds, until the block ends:

        with RunLocks() as locks:
            locks.take("--save_path", folder)

    One process of a run takes them, its first rank.
    """

    def __init__(self) -> None:
        self._held: dict[Path, Owner] = {}
        self._end = threading.Event()

    def __enter__(self) -> "RunLocks":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end.set()
        for file, owner in self._held.items():
            with contextlib.suppress(OSError):
                if _read(file) == owner:
                    file.unlink()
        self._held = {}

    def take(self, flag: str, folder: Path) -> None:
        """Make the folder, if it is not there, and hold it for this run.

        Raises:
            ConfigError: another run holds it, or nothing can be written there.
        """
        file, own = folder.resolve() / NAME, Owner.this_process()
        if file in self._held:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            other = _take(file, own)
        except OSError as error:
            raise ConfigError(
                f"{flag}: must be a folder that can be written; got {folder} ({error.strerror}). Name another."
            ) from error
        if other is not None:
            raise ConfigError(
                f"{flag}: a folder takes one run at a time; got {folder}, where another run is active ({other}). Wait "
                "for its end, stop it, or name another folder."
            )
        self._held[file] = own
        if len(self._held) == 1:
            threading.Thread(target=self._beat, daemon=True, name="lock").start()

    def _beat(self) -> None:
        while not self._end.wait(BEAT_SECONDS):
            for file, own in list(self._held.items()):
                _touch(file, own)


def _touch(file: Path, own: Owner) -> None:
    """Show that the owner lives; end the process where another run has taken the folder meanwhile."""
    try:
        found = _read(file)
        if found == own:
            os.utime(file)
        elif found is None:
            with file.open("x", encoding="utf-8") as new:
                json.dump(dataclasses.asdict(own), new)
        else:
            # This process stood still for so long that it was taken for dead. What it would write now breaks a run.
            os.write(2, f"error: {file.parent}: another run has taken this folder ({found}); this one ends.\n".encode())
            os._exit(1)
    except OSError:
        return  # the disk is away for a moment, or the folder is gone


def _take(file: Path, own: Owner) -> Owner | None:
    """Write the lock, or return the living owner of the one that is there."""
    while True:
        with file.open("a+", encoding="utf-8") as opened:
            try:
                fcntl.flock(opened, fcntl.LOCK_EX)
            except OSError as error:
                if error.errno not in HAS_NO_FLOCK:
                    raise
            if not _is_at(file, opened.fileno()):
                continue  # its owner ended and deleted it meanwhile
            other = _read(file)
            if other is not None and _lives(file, other):
                return other
            opened.truncate(0)
            json.dump(dataclasses.asdict(own), opened)
        found = _read(file)
        if found is None:
            continue
        if other is not None and found == own:
            log.info("%s: took over the lock of a run that ended without removing it (%s)", file.parent, other)
        return None if found == own else found


def _is_at(file: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(file), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _lives(file: Path, owner: Owner) -> bool:
    """Whether an owner still runs."""
    if owner.number_space and owner.number_space == number_space():
        return Process(owner.pid, owner.start_ticks).is_running()
    log.info("%s: a run left a lock there (%s); checking whether it is still running", file.parent, owner)
    last, end = _last_sign(file), time.monotonic() + SILENT_SECONDS
    while time.monotonic() < end:
        time.sleep(min(1.0, SILENT_SECONDS / 10))
        sign = _last_sign(file)
        if sign != last:
            return sign is not None
    return False


def _last_sign(file: Path) -> int | None:
    """Return when a lock was touched; it is opened for that, or NFS may answer from its memory. None: it is gone."""
    try:
        with file.open("rb") as opened:
            return os.fstat(opened.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None


def _read(file: Path) -> Owner | None:
    """Return whose lock it is; None where there is none, or one that was cut short."""
    try:
        return Owner(**json.loads(file.read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, TypeError):
        return None
