"""What a processor's memory has left for a process."""

from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def free_memory() -> float:
    """Return the bytes that a process may take here: what the system has free, or what a container's limit leaves."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
    free = float(lines["MemAvailable"].split()[0]) * 1024
    limit = _read("memory.max") if (CGROUP / "memory.max").exists() else "max"
    if limit == "max":
        return free
    # Pages of files that nobody has used lately count as the container's, and are given up where memory is needed.
    pages = dict(line.split() for line in _read("memory.stat").splitlines())
    used = float(_read("memory.current")) - float(pages["inactive_file"])
    return min(free, max(float(limit) - used, 0.0))


def _read(name: str) -> str:
    return (CGROUP / name).read_text(encoding="ascii").strip()
