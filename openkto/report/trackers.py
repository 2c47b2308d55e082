"""Where a run's numbers go: metrics.jsonl at once, TensorBoard, W&B and others from threads of their own.

Training never waits for a tracker: one that raises is turned off with a warning, and one that hangs loses its newest
values once its queue is full. metrics.jsonl is therefore the record, and the trackers are views of it.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from openkto.config import OutputConfig
from openkto.config.output import TRACKERS
from openkto.errors import ConfigError, need_package
from openkto.report.of_accelerate import OfAccelerate
from openkto.report.records import METRICS, SAMPLES, RecordFile, read_lines
from openkto.report.samples import COLUMNS, Line, as_markdown, as_rows
from openkto.report.tracker import Tracker, Values, named, run_name

logger = logging.getLogger(__name__)

QUEUE_LINES = 1000
CLOSE_SECONDS = 15.0


class Trackers:
    """All trackers of a run; made only on rank 0.

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
        first_step: int = 0,
    ) -> None:
        """Open metrics.jsonl and start the threads.

        Args:
            output: where to write and which trackers are on.
            config_for_trackers: the run's settings by flat name, shown by W&B; W&B's own key is not among them.
            more_trackers: name to a function that makes a tracker, called in the tracker's own thread.
            run_id: the same over all starts of a run; what metrics.jsonl holds already is its own.
            first_step: how many steps earlier starts have made, up to the checkpoint that is resumed from.
        """
        metrics = Path(output.save_path) / METRICS
        self._file = RecordFile(metrics)
        wanted = dict(more_trackers or {})
        if output.use_tensorboard != "none":
            folder = output.use_tensorboard or os.path.join(output.save_path, "tensorboard")
            recorded = [line for _, line in read_lines(metrics) if line is not None]
            answers = [line for _, line in read_lines(metrics.with_name(SAMPLES)) if line is not None]
            wanted["TensorBoard"] = lambda: TensorBoard(folder, run_id, recorded, first_step, answers)
        if output.use_wandb or "wandb" in output.report_to:
            need_package("--use_wandb", "wandb", "wandb")
            wanted["W&B"] = lambda: WeightsAndBiases(output, config_for_trackers, run_id)
        for name in dict.fromkeys(output.report_to):
            if name not in ("wandb", "tensorboard"):
                need_package("--report_to", name, TRACKERS[name])
                wanted[name] = partial(OfAccelerate, name, output, config_for_trackers)
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
            thread.put(lambda tracker: tracker.log(kind, step, kept))

    def show_samples(self, step: int, lines: Sequence[Line]) -> None:
        """Show the answers of a step, as a table."""
        for thread in self._threads:
            thread.put(lambda tracker: tracker.show_samples(step, lines))

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


class TrackerThread:
    """One tracker in a daemon thread, so that neither its start nor its calls can hold up training."""

    def __init__(self, name: str, make: Callable[[], Tracker]) -> None:
        self.name = name
        self.dropped = 0
        self._queue: queue.Queue[Callable[[Tracker], None] | None] = queue.Queue(maxsize=QUEUE_LINES)
        self._thread = threading.Thread(target=self._run, args=(make,), name=f"tracker {name}", daemon=True)
        self._thread.start()

    def put(self, tell: Callable[[Tracker], None]) -> None:
        if not self._thread.is_alive():
            return
        try:
            self._queue.put_nowait(tell)
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
            logger.warning("%s: did not finish in time; its last values are only in metrics.jsonl.", self.name)
        elif self.dropped:
            logger.warning("%s: %d lines were left out; metrics.jsonl has them.", self.name, self.dropped)

    def _run(self, make: Callable[[], Tracker]) -> None:
        # A tracker is other people's code over a network: whatever it raises must end here, and be said once.
        try:
            tracker = make()
            while (tell := self._queue.get()) is not None:
                tell(tracker)
            tracker.close()
        except Exception as error:
            logger.warning("%s: is switched off (%s: %s); training continues.", self.name, type(error).__name__, error)


class TensorBoard:
    """Writes event files that TensorBoard shows.

    A resumed run repeats steps that it had made before it was stopped. So its files are written again from what
    metrics.jsonl and samples.jsonl hold, with the times at which the values were first logged: each step is there once.
    Where metrics.jsonl begins later than the run, which came from another folder, what was logged before is taken over
    as it is.
    """

    def __init__(
        self,
        folder: str,
        run_id: str = "",
        recorded: Sequence[Line] = (),
        first_step: int = 0,
        answers: Sequence[Line] = (),
    ) -> None:
        from torch.utils.tensorboard import SummaryWriter

        suffix = f".{run_id}" if run_id else ""
        earlier = sorted(Path(folder).glob(f"events.out.tfevents.*{suffix}")) if run_id else []
        events = [event for file in earlier for event in _events(file)]
        times = {(value.tag, event.step): event.wall_time for event in events for value in event.summary.value}
        begin = next((line["step"] for line in recorded if line["kind"] == "run"), first_step)
        self._writer = SummaryWriter(folder, filename_suffix=suffix)
        file_writer = self._writer._get_file_writer()
        for event in events:
            if event.step <= begin and begin > 0 and event.summary.value:
                file_writer.event_writer.add_event(event)
        for line in recorded:
            if line["step"] > begin or begin == 0:
                values = {name: value for name, value in line.items() if name not in ("kind", "step")}
                self._add(line["kind"], line["step"], values, times)
        for step in dict.fromkeys(line["step"] for line in answers):
            if step > begin or begin == 0:
                self._add_samples(step, [line for line in answers if line["step"] == step])
        self._writer.flush()
        for file in earlier:
            file.unlink()

    def log(self, kind: str, step: int, values: Values) -> None:
        self._add(kind, step, values, {})
        self._writer.flush()

    def show_samples(self, step: int, lines: Sequence[Line]) -> None:
        self._add_samples(step, lines)
        self._writer.flush()

    def _add_samples(self, step: int, lines: Sequence[Line]) -> None:
        self._writer.add_text("samples", as_markdown(lines), step)

    def _add(self, kind: str, step: int, values: Values, times: dict[tuple[str, int], float]) -> None:
        if kind in ("train", "eval"):
            for name, value in named(kind, values).items():
                self._writer.add_scalar(name, value, step, walltime=times.get((name, step)))
        else:
            self._writer.add_text(kind, "\n".join(f"    {name}: {value}" for name, value in values.items()), step)

    def close(self) -> None:
        self._writer.close()


def _events(file: Path) -> list[Any]:
    """Return the events of a file as they were written, as far as it is whole."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    return list(LegacyEventFileLoader(str(file)).Load())


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
            name=run_name(output),
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

    def show_samples(self, step: int, lines: Sequence[Line]) -> None:
        import wandb

        self._run.log({"samples": wandb.Table(columns=list(COLUMNS), data=as_rows(lines)), "global_step": step})

    def close(self) -> None:
        self._run.finish()
