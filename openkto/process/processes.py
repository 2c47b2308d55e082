"""Facts about processes: whether one still runs, when it started, and which launcher started this one.

Only Linux says so, in /proc; elsewhere nothing is known.
"""

import os
from pathlib import Path
from typing import NamedTuple

# A launcher is known by one of these among the first words of its command line, as a program or as a module.
LAUNCHERS = {
    *("torchrun", "torch.distributed.run", "torch.distributed.launch", "accelerate"),
    *("deepspeed", "deepspeed.launcher.runner", "deepspeed.launcher.launch"),
}
FIRST_WORDS = 4  # python -u -m torch.distributed.run


class Process(NamedTuple):
    """A process by its number and its start: numbers are given again, with another start."""

    pid: int
    start_ticks: int  # clock ticks since the system booted

    def is_running(self) -> bool:
        """Whether it still runs; one that has ended and waits for its parent to notice does not."""
        fields = _stat(self.pid)
        return fields is not None and fields[0] not in "ZX" and int(fields[19]) == self.start_ticks


def process(pid: int) -> Process | None:
    """Return a process by its number; None where the system knows none."""
    fields = _stat(pid)
    return None if fields is None else Process(pid, int(fields[19]))


def number_space() -> str:
    """Return what is the same for two processes to which a process number means the same: this boot and container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def launchers() -> list[Process]:
    """Return the launchers above this process, the nearest first; `deepspeed` is two of them."""
    found, pid = [], os.getppid()
    while pid > 0 and (fields := _stat(pid)) is not None:
        if _is_launcher(pid):
            found.append(Process(pid, int(fields[19])))
        pid = int(fields[1])
    return found


def _is_launcher(pid: int) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return False
    return any(os.path.basename(word) in LAUNCHERS for word in words[:FIRST_WORDS])


def _stat(pid: int) -> list[str] | None:
    """Return the fields after the program's name, which may hold anything: state, parent, ..., start."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
