"""A SLURM of two nodes on this machine, for as long as a `with` block lasts.

By hand: `python -m tests.slurm.cluster` opens a shell in which sbatch, srun, squeue and scancel work, until it ends.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
FREEZER = Path("/sys/fs/cgroup/freezer")
SECONDS_TO_START = 30
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "sinfo", "ip", "unshare", "nsenter")


class NoClusterError(Exception):
    """There can be no SLURM on this machine; the message says why."""


class Cluster:
    """A running SLURM; commands run on its controller."""

    def __init__(self, folder: Path, first_process: int) -> None:
        self.folder = folder
        self._enter = ["nsenter", f"--target={first_process}", "--mount", "--pid", "--net", "--uts"]

    def command(self, *words: str, cwd: Path | None = None) -> list[str]:
        """Return the command that runs these words on the controller."""
        return [*self._enter, f"--wd={cwd or Path.cwd()}", "env", f"SLURM_CONF={self.folder}/slurm.conf", *words]

    def run(self, *words: str, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
        """Run a command on the controller and return what it printed."""
        environment = {**os.environ, **(env or {})}
        done = subprocess.run(
            self.command(*words, cwd=cwd), env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        """Return what SLURM knows of a job, such as JobState, Restarts and ExitCode."""
        shown = self.run("scontrol", "--oneliner", "show", "job", number)
        return dict(word.split("=", 1) for word in shown.split() if "=" in word)


def problem() -> str | None:
    """Return why there can be no SLURM on this machine, or None."""
    if os.geteuid() != 0:
        return "not root, who alone can make the two nodes' networks"
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not found; tests/slurm/install.sh installs them on Debian"
    return None


@contextlib.contextmanager
def slurm_cluster(folder: Path) -> Iterator[Cluster]:
    """Bring a SLURM up, with its files in `folder`; end all its processes afterwards, however the block ends.

    Raises:
        NoClusterError: it does not start.
    """
    why = problem()
    if why is not None:
        raise NoClusterError(why)
    freezer = _own_freezer()
    output = (folder / "output").open("w")
    # `setpriv` and --kill-child: should even this process be killed, all goes with it.
    namespaces = ["--mount", "--mount-proc", "--pid", "--fork", "--kill-child", "--net", "--uts"]
    process = subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", "unshare", *namespaces, str(HERE / "cluster.sh"), str(folder)],
        env={**os.environ, "FREEZER": str(freezer or "")},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
    )
    try:
        until = time.monotonic() + SECONDS_TO_START
        while not (folder / "ready").exists():
            if process.poll() is not None or time.monotonic() > until:
                raise NoClusterError(f"SLURM's daemons do not start:\n{_last_words(folder)}")
            time.sleep(0.1)
        (first_process,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        yield Cluster(folder, int(first_process))
    finally:
        process.kill()
        process.wait()
        output.close()
        if freezer is not None:
            _remove(freezer)


def _own_freezer() -> Path | None:
    """Return a new subtree of cgroup version 1's freezer; None where that is not mounted or not writable."""
    try:
        return Path(tempfile.mkdtemp(prefix="openkto-slurm-", dir=FREEZER))
    except OSError:
        return None


def _remove(freezer: Path) -> None:
    for _ in range(100):  # a killed process leaves its group a moment later
        with contextlib.suppress(OSError):
            for group in sorted((path for path in freezer.rglob("*") if path.is_dir()), reverse=True):
                group.rmdir()
            freezer.rmdir()
            return
        time.sleep(0.05)
    print(f"warning: {freezer} could not be removed", file=sys.stderr)


def _last_words(folder: Path) -> str:
    files = [folder / "output", *sorted(folder.glob("log/*.out"))]
    return "\n".join(line for file in files if file.exists() for line in file.read_text().splitlines()[-8:])


def main() -> None:
    """Open a shell on a cluster's controller."""
    with tempfile.TemporaryDirectory() as folder, slurm_cluster(Path(folder)) as cluster:
        subprocess.run(cluster.command(os.environ.get("SHELL", "bash")), check=False)


if __name__ == "__main__":
    main()
