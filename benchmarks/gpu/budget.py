"""Processes of `benchmarks/gpu`, one after the other until the time is over; none takes another's results with it.

What a process has written is kept even where it fails later, and why it failed is printed at once and kept, too.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SHORTEST = 20.0  # seconds; with less left nothing is begun
LOG_SHOWN = 3000  # characters of a failed process's log
RESULT_SHOWN = 1000  # of each result


class Budget:
    """Runs processes and collects their results.

    Args:
        minutes: that all may take together.
        folder: for their files.
        out: where to keep the results as JSON after each process; a machine may be taken away at any time.
    """

    def __init__(self, minutes: float, folder: Path, out: Path | None) -> None:
        self.folder, self.out, self.end = folder, out, time.monotonic() + 60 * minutes
        self.scale = minutes / 9
        self.results: dict[str, Any] = {}
        self.left_out: list[str] = []

    def run(self, name: str, module: str, settings: dict[str, Any], seconds: float) -> Any:
        """Keep and return what the process wrote, or None where that is nothing.

        Args:
            seconds: that it may take of nine minutes; without that much left it gets what there is.
        """
        limit = min(seconds * self.scale, self.end - time.monotonic())
        if limit < SHORTEST:
            self._fail(name, "no time was left", "")
            self.keep(name, None)
            return None
        place = self.folder / "".join(c if c.isalnum() else "-" for c in name)
        place.mkdir()
        settings = settings | {"folder": str(place), "result": f"{place}/result.json", "started": time.time()}
        (place / "settings.json").write_text(json.dumps(settings), encoding="utf-8")
        print(f"--- {name} (at most {limit:.0f} s)", flush=True)
        started = time.monotonic()
        failure = self._spawn(place, module, limit)
        print(f"    {time.monotonic() - started:.0f} s", flush=True)
        try:
            result = json.loads((place / "result.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            result, failure = None, failure or f"left no result ({error})"
        if failure:
            log = (place / "log").read_text(encoding="utf-8", errors="replace")
            self._fail(name, failure + ("" if result is None else ", after it had written what is shown"), log)
        self.keep(name, result)
        return result

    def _spawn(self, place: Path, module: str, limit: float) -> str:
        """Run the process to its end and return why it failed, or nothing."""
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        with (place / "log").open("w", encoding="utf-8") as log:
            try:
                done = subprocess.run(
                    [sys.executable, "-u", "-X", "faulthandler", "-m", module, f"{place}/settings.json"], cwd=ROOT,
                    env=environment, stdout=log, stderr=subprocess.STDOUT, timeout=limit, check=False,
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                return f"was ended after {limit:.0f} s"
            except OSError as error:
                return f"could not be started ({error})"
        return f"ended with status {done.returncode}" if done.returncode else ""

    def _fail(self, name: str, why: str, log: str) -> None:
        last = next((line.strip() for line in reversed(log.splitlines()) if line.strip()), "")
        self.left_out.append(f"{name}: {why}" + (f"; its last line: {last[:300]}" if last else ""))
        print(f"    {name} {why}\n{log[-LOG_SHOWN:]}", flush=True)

    def keep(self, name: str, result: Any) -> None:
        """Keep a result, also in what is printed and in the file."""
        self.results[name] = result
        print(f"    {json.dumps(result)[:RESULT_SHOWN]}", flush=True)
        if self.out is not None:
            self.out.write_text(json.dumps(self.results | {"left out": self.left_out}, indent=1), encoding="utf-8")
