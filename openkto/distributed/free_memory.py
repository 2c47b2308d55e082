"""What a processor's memory has left for a process."""

from pathlib import Path

CGROUP = Path("/sys/fs/cgroup/memory.max")


def free_memory() -> float:
    """Return the bytes that a process may take here: what the system has free, or a container's limit."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
    free = float(lines["MemAvailable"].split()[0]) * 1024
    limit = CGROUP.read_text(encoding="ascii").strip() if CGROUP.exists() else "max"
    return free if limit == "max" else min(free, float(limit))
