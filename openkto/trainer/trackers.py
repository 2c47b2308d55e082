"""Where a run's numbers go: metrics.jsonl at once, TensorBoard and W&B from threads of their own.

Training never waits for a tracker: one that raises is turned off with a warning, and one that hangs loses its newest
values once its queue is full. metrics.jsonl is therefore the record, and the trackers are views of it.
"""

from __future__ import annotations

import json
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from openkto.checks import need_package
from openkto.config import OutputConfig
from openkto.errors import ConfigError

logger = logging.getLogger(__name__)

Values = dict[str, float | int | str]

QUEUE_LINES = 1000
CLOSE_SECONDS = 15.0


class Tracker(Protocol):
    """What a view of the metrics must do; it lives in one thread."""

    def log(self, kind: str, step: int, values: Values) -> None: ...

    def close(self) -> None: ...


class Trackers:
    """All trackers of a run; made on rank 0 alone.

    Raises:
        ConfigError: when `save_path` cannot be written, or W&B is on and its package is missing.
    """

    def __init__(
        self,
        output: OutputConfig,
        config_for_trackers: dict[str, Any],
        more_trackers: Mapping[str, Callable[[], Tracker]] | None = None,
        *,
        run_id: str = "",
    ) -> None:
        """Open metrics.jsonl and start the threads.

        Args:
            output: where to write and which trackers are on.
            config_for_trackers: the run's settings by flat name, shown by W&B; no key is among them.
            more_trackers: name to a function that makes a tracker, called in the tracker's own thread.
            run_id: the same over all starts of a run; what metrics.jsonl holds already is its own.
        """
        self._file = MetricsFile(Path(output.save_path))
        wanted = dict(more_trackers or {})
        if output.use_tensorboard != "none":
            folder = output.use_tensorboard or os.path.join(output.save_path, "tensorboard")
            recorded = self._file.recorded()
            wanted["TensorBoard"] = lambda: TensorBoard(folder, run_id, recorded)
        if output.use_wandb:
            need_package("--use_wandb", "wandb", "'openkto[wandb]'")
            wanted["W&B"] = lambda: WeightsAndBiases(output, config_for_trackers, run_id)
        self._threads = [TrackerThread(name, make) for name, make in wanted.items()]

    def log(self, kind: str, step: int, values: Mapping[str, float | int | str | None]) -> None:
        """Record one line of a kind: train, eval, run or summary. A value that is None or not finite is left out."""
        kept = {
            name: value
            for name, value in values.items()
            if value is not None and not (isinstance(value, float) and not math.isfinite(value))
        }
        self._file.write({"kind": kind, "step": step, **kept})
        for thread in self._threads:
            thread.put(kind, step, kept)

    def sync(self) -> None:
        """Flush metrics.jsonl to the disk."""
        self._file.sync()

    def close(self, timeout_seconds: float = CLOSE_SECONDS) -> None:
        """Let the trackers finish, for no longer than the time given in all."""
        deadline = time.monotonic() + timeout_seconds
        for thread in self._threads:
            thread.finish()
        for thread in self._threads:
            thread.join(deadline)
        self._file.close()


class MetricsFile:
    """metrics.jsonl: one JSON object a line, on disk when `write` returns. A started file is carried on."""

    def __init__(self, folder: Path) -> None:
        self._path = path = folder / "metrics.jsonl"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # A line that a crash cut short must not swallow the next one.
            self._is_cut = path.is_file() and not path.read_bytes().endswith(b"\n") and path.stat().st_size > 0
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise ConfigError(
                f"--save_path: must be a folder that can be written; got {str(folder)!r} ({error.strerror}). "
                "Give another path."
            ) from None
        self._has_warned = False

    def write(self, line: dict[str, Any]) -> None:
        text = json.dumps(line, allow_nan=False, ensure_ascii=False) + "\n"
        content = (b"\n" if self._is_cut else b"") + text.encode("utf-8", errors="backslashreplace")
        size = self._path.stat().st_size
        try:
            written = self._file.write(content)
            reason = None if written == len(content) else "No space left on device"
        except OSError as error:
            reason = error.strerror
        if reason is None:
            self._is_cut = False
            return
        try:
            os.truncate(self._path, size)  # half a line is no JSON, and taking it back needs no space
        except OSError:
            self._is_cut = True
        if not self._has_warned:
            logger.warning("metrics.jsonl: a line was lost (%s); training goes on.", reason)
        self._has_warned = True

    def recorded(self) -> list[dict[str, Any]]:
        """Return the lines that the file holds already."""
        return [json.loads(line) for line in self._path.read_bytes().splitlines() if line.endswith(b"}")]

    def sync(self) -> None:
        """Let the lines survive a power cut, as the checkpoint does that counts on them."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            logger.warning("metrics.jsonl: could not be flushed (%s); training goes on.", error.strerror)

    def close(self) -> None:
        self._file.close()


class TrackerThread:
    """One tracker in a daemon thread, so that neither its start nor its calls can hold up training."""

    def __init__(self, name: str, make: Callable[[], Tracker]) -> None:
        self.name = name
        self.dropped = 0
        self._queue: queue.Queue[tuple[str, int, Values] | None] = queue.Queue(maxsize=QUEUE_LINES)
        self._thread = threading.Thread(target=self._run, args=(make,), name=f"tracker {name}", daemon=True)
        self._thread.start()

    def put(self, kind: str, step: int, values: Values) -> None:
        if not self._thread.is_alive():
            return
        try:
            self._queue.put_nowait((kind, step, values))
        except queue.Full:
            if not self.dropped:
                logger.warning("%s: does not keep up; values are left out there, not in metrics.jsonl.", self.name)
            self.dropped += 1

    def finish(self) -> None:
        """Ask the thread to end after what it has; a full queue means that it hangs, and then there is no use."""
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            return

    def join(self, deadline: float) -> None:
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self.dropped += self._queue.qsize()
            logger.warning("%s: did not finish in time; its last values are in metrics.jsonl alone.", self.name)
        elif self.dropped:
            logger.warning("%s: %d lines were left out; metrics.jsonl has them.", self.name, self.dropped)

    def _run(self, make: Callable[[], Tracker]) -> None:
        # A tracker is other people's code over a network: whatever it raises must end here, and be said once.
        try:
            tracker = make()
            while (item := self._queue.get()) is not None:
                tracker.log(*item)
            tracker.close()
        except Exception as error:
            logger.warning(
                "%s: is off from here on (%s: %s); training goes on.", self.name, type(error).__name__, error
            )


def named(kind: str, values: Values) -> dict[str, float | int]:
    """Return the numbers under the names that trackers show: `train/loss`, `eval/loss` or `eval/<set>/loss`."""
    eval_set = values.get("eval_set")
    prefix = f"{kind}/{eval_set}" if eval_set else kind
    return {f"{prefix}/{name}": value for name, value in values.items() if not isinstance(value, str)}


class TensorBoard:
    """Writes event files that TensorBoard shows.

    A resumed run takes steps anew that it had made before it was stopped. So its files are written again from what
    metrics.jsonl holds, with the times at which the values were first logged: each step is there once.
    """

    def __init__(self, folder: str, run_id: str = "", recorded: Sequence[dict[str, Any]] = ()) -> None:
        from torch.utils.tensorboard import SummaryWriter

        suffix = f".{run_id}" if run_id else ""
        earlier = sorted(Path(folder).glob(f"events.out.tfevents.*{suffix}")) if run_id else []
        times = {key: time for file in earlier for key, time in _event_times(file)}
        self._writer = SummaryWriter(folder, filename_suffix=suffix)
        for line in recorded:
            self._add(line["kind"], line["step"], {k: v for k, v in line.items() if k not in ("kind", "step")}, times)
        self._writer.flush()
        for file in earlier:
            file.unlink()

    def log(self, kind: str, step: int, values: Values) -> None:
        self._add(kind, step, values, {})
        self._writer.flush()

    def _add(self, kind: str, step: int, values: Values, times: dict[tuple[str, int], float]) -> None:
        if kind in ("train", "eval"):
            for name, value in named(kind, values).items():
                self._writer.add_scalar(name, value, step, walltime=times.get((name, step)))
        else:
            self._writer.add_text(kind, "\n".join(f"    {name}: {value}" for name, value in values.items()), step)

    def close(self) -> None:
        self._writer.close()


def _event_times(file: Path) -> list[tuple[tuple[str, int], float]]:
    """Return when each value of an event file was logged, as far as the file is whole."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    events = EventFileLoader(str(file)).Load()
    return [((value.tag, event.step), event.wall_time) for event in events for value in event.summary.value]


class WeightsAndBiases:
    """Sends the numbers to W&B, or to a folder under `save_path` with WANDB_MODE=offline.

    The step axis is our own, `global_step`: W&B's counter refuses a step that it has seen before.
    """

    def __init__(self, output: OutputConfig, config: dict[str, Any], run_id: str = "") -> None:
        import wandb

        # Never let W&B ask for a key: a thread that reads the terminal cannot be stopped.
        is_online = wandb.setup().settings.mode in ("online", "shared")
        if is_online and not wandb.login(prompt=False, verify=False):
            raise ConfigError("no key is known; set WANDB_API_KEY or run `wandb login`")
        self._run = wandb.init(
            project=output.wandb_project,
            entity=output.wandb_org,
            group=output.wandb_group,
            id=run_id or None,
            resume="allow" if run_id else None,
            name=output.wandb_run_name or f"kto_{datetime.now():%m%dT%H:%M}",
            dir=os.environ.get("WANDB_DIR", output.save_path),
            config=config,
            settings=wandb.Settings(console="off"),
        )
        self._run.define_metric("*", step_metric="global_step")

    def log(self, kind: str, step: int, values: Values) -> None:
        if kind in ("train", "eval"):
            self._run.log({**named(kind, values), "global_step": step})
        else:
            self._run.summary.update({f"{kind}/{name}": value for name, value in values.items()})

    def close(self) -> None:
        self._run.finish()
