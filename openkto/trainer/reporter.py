"""Writes a run's log lines, trackers and records (batches, rewards, samples and tokens), all from rank 0.

Every rank holds a `Reporter` and calls it at the same places, since the peak memory is a maximum over ranks.
"""

import dataclasses
import json
import logging
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from openkto.batches.loader import KTODataLoader, RankBatch
from openkto.distributed.agreement import on_some_ranks
from openkto.errors import ConfigError
from openkto.files import flush_to_disk
from openkto.models.loss import KTOLoss
from openkto.report.environment import environment
from openkto.report.flops import StepWork
from openkto.report.metrics import BatchRows
from openkto.report.progress import Progress
from openkto.report.records import (
    BATCHES,
    REWARDS,
    SAMPLE,
    SAMPLES,
    Line,
    RecordFile,
    belongs_to,
    go_back,
    lines_of_older_version,
    set_aside,
)
from openkto.report.samples import for_log
from openkto.report.standstill import Standstill
from openkto.report.throughput import StepCounts, Throughput, peak_memory_gib
from openkto.report.trackers import Trackers
from openkto.trainer.callbacks import Callback
from openkto.trainer.rng import Arrays
from openkto.trainer.run_state import RunState, known_fields
from openkto.trainer.step_report import StepReport, values_of

log = logging.getLogger(__name__)

COUNTS = ("num_tokens", "same_prompt", "same_completion", "skipped")
ROW_ARRAYS = tuple(field.name for field in dataclasses.fields(BatchRows) if field.name.endswith("_N"))


class Resumed(NamedTuple):
    """What `Reporter.state` returned when the checkpoint was saved."""

    values: dict[str, Any]
    arrays: Arrays


class Reporter:
    """Pools steps into log lines and writes them.

    Args:
        args: see `FitArgs`.
        strategy, num_parameters, num_trainable, work, loss, loader: the trainer's.
        total_steps: of the schedule.
        run: where the run stands; the loop moves it on.
        callbacks: told of each step, evaluation and checkpoint, on every rank.
        resumed: what was open when the checkpoint was saved; None in a run that starts afresh, which sets an earlier
            run's files aside.
    """

    def __init__(
        self,
        args: Any,
        strategy: Any,
        num_parameters: int,
        num_trainable: int,
        work: StepWork,
        loss: KTOLoss,
        loader: KTODataLoader,
        total_steps: int,
        run: RunState,
        callbacks: Sequence[Callback] = (),
        resumed: Resumed | None = None,
    ) -> None:
        self.args, self.strategy = args, strategy
        self.work, self.throughput = work, Throughput(strategy.world_size, strategy.device)
        self.loss, self.callbacks = loss, callbacks
        self.reports: list[StepReport] = []
        self.num_tokens = self.same_prompt = self.same_completion = self.skipped = 0
        self.seconds_before = 0.0
        self.started = time.perf_counter()
        self.last: dict[str, float] = {}
        self.run, self.rows_per_epoch, self.total_steps = run, loader.num_rows, total_steps
        self.standstill = Standstill()
        self.trackers: Trackers | None = None
        self.progress: Progress | None = None
        self.batches_file: RecordFile | None = None
        self.rewards_file: RecordFile | None = None
        self.samples_file: RecordFile | None = None  # once there are samples
        self.train_lines: int | None = 0  # None: an older version did not count them
        self.step_of_lines, self.lines_at_step = run.step, Counter[str]()  # written of the newest step, by kind
        if resumed is not None:
            self._restore(resumed)
        on_some_ranks(strategy, lambda: self._open_records(loader, resumed), is_mine=strategy.rank == 0)
        if self.trackers is not None:
            self.progress = Progress(total_steps, run.step)
            values = environment(strategy.world_size, strategy.device) | {
                "run_id": run.run_id,
                "parameters": num_parameters,
                "trainable_parameters": num_trainable,
                "rows": loader.num_rows,
                "total_steps": total_steps,
            }
            self._log("run", values)

    def _open_records(self, loader: KTODataLoader, resumed: Resumed | None) -> None:
        folder, step = Path(self.args.save_path), self.run.step
        if resumed is not None and belongs_to(folder, self.run.run_id):
            older = lines_of_older_version(has_open_window=bool(resumed.values["reports"]))
            go_back(folder, step, resumed.values.get("lines_at_step", older), train_lines=self.train_lines)
        else:
            set_aside(folder)
        self.rewards_file = RecordFile(folder / REWARDS)
        if self.args.log_batches:
            self.batches_file = RecordFile(folder / BATCHES)
            self._write_tokens(folder, loader)
        self.trackers = Trackers(self.args, self.args.settings, run_id=self.run.run_id, first_step=step)

    def _log(self, kind: str, values: dict[str, Any]) -> None:
        """Write a line of this step; on rank 0."""
        assert self.trackers is not None, "other ranks have no trackers"
        self._count(kind)
        if self.train_lines is not None:
            self.train_lines += kind == "train"
        self.trackers.log(kind, self.run.step, values)

    def _count(self, kind: str) -> None:
        if self.run.step != self.step_of_lines:
            self.step_of_lines, self.lines_at_step = self.run.step, Counter()
        self.lines_at_step[kind] += 1

    # ---- in and out of a checkpoint ---------------------------------------------------------------------------------

    def state(self) -> Resumed:
        """Return the counts, the open window and how many lines were written, for a checkpoint to keep."""
        if self.trackers is not None:
            self.trackers.sync()
            for record in (self.batches_file, self.rewards_file, self.samples_file):
                if record is not None:
                    record.sync()
        arrays: Arrays = {}
        reports = []
        for i, report in enumerate(self.reports):
            values = dataclasses.asdict(report)
            arrays |= {f"{i}/{name}": values["rows"].pop(name) for name in ROW_ARRAYS}
            reports.append(values)
        values = {name: getattr(self, name) for name in COUNTS} | {
            "seconds": self.seconds_before + time.perf_counter() - self.started,
            "window_seconds": self.throughput.seconds,
            "window_flops": self.throughput.flops,
            "last": self.last,
            "reports": reports,
            "lines_at_step": dict(self.lines_at_step) if self.step_of_lines == self.run.step else {},
            "train_lines": self.train_lines,
        }
        return Resumed(values, arrays)

    def _restore(self, resumed: Resumed) -> None:
        for name in COUNTS:
            setattr(self, name, resumed.values[name])
        self.seconds_before, self.last = resumed.values["seconds"], resumed.values["last"]
        for i, values in enumerate(resumed.values["reports"]):
            known = [name for name in ROW_ARRAYS if f"{i}/{name}" in resumed.arrays]  # earlier versions had fewer
            per_row: dict[str, Any] = {name: resumed.arrays[f"{i}/{name}"] for name in known}
            rows = BatchRows(**known_fields(BatchRows, values.pop("rows")), **per_row)
            counts = StepCounts(**known_fields(StepCounts, values.pop("counts")))
            report = StepReport(rows=rows, counts=counts, **known_fields(StepReport, values))
            self._pool(report, 0.0, 0.0)
        self.train_lines = resumed.values.get("train_lines")
        self.lines_at_step.update(resumed.values.get("lines_at_step", {}))
        self.throughput.seconds = resumed.values["window_seconds"]
        self.throughput.flops = resumed.values.get("window_flops", 0.0)  # earlier versions counted none

    def _write_tokens(self, folder: Path, loader: KTODataLoader) -> None:
        try:
            with (folder / "tokens.jsonl").open("w", encoding="utf-8") as tokens:
                for i in range(loader.num_rows):
                    row = loader.dataset[i]
                    line = {name: row[name] for name in ("row", "prompt_ids", "completion_ids")}
                    if not all(row["completion_mask"]):
                        line["completion_mask"] = row["completion_mask"]
                    tokens.write(json.dumps(line) + "\n")
            flush_to_disk(folder / "tokens.jsonl")
        except OSError as error:
            raise ConfigError(
                f"--log_batches: cannot write into {folder}; {error}. Name another --save_path."
            ) from error

    def step(self, batch: RankBatch, report: StepReport, seconds: float) -> None:
        """Take one step in; write a line when one is due."""
        self._pool(report, seconds, self.work.of(batch))
        self.standstill.see(self.run.step, report)
        self.num_tokens += report.counts.matched_tokens
        self.same_prompt += report.counts.same_prompt
        self.same_completion += report.counts.same_completion
        self.skipped += not report.applied
        self._write_batch(self.run.step, batch)
        self._write_rewards(report.rows)
        if self.run.step == self.total_steps or self.run.step % self.args.logging_steps == 0:
            self.write_window()
        if self.callbacks:
            values = self._position() | values_of(self.loss, [report])
            for callback in self.callbacks:
                callback.on_step(self.run.step, dict(values))

    def saved(self, folder: Path) -> None:
        """Tell that this step's checkpoint is complete in a folder."""
        for callback in self.callbacks:
            callback.on_save(self.run.step, folder)

    def failed_step(self, batch: RankBatch) -> None:
        """Write which rows the step had that could not be made."""
        self._write_batch(self.run.step, batch)

    def _write_batch(self, step: int, batch: RankBatch) -> None:
        if self.batches_file is not None:
            self.batches_file.write({"step": step, "rows": batch.rows.tolist(), "kl_rows": batch.kl_rows.tolist()})

    def _write_rewards(self, rows: BatchRows) -> None:
        """Write each row's reward, to as many digits as a reader can use: `openkto report` finds label errors by it."""
        if self.rewards_file is not None:
            point, *rewards = (float(f"{self.loss.beta * value:.5g}") for value in (rows.z_ref, *rows.log_ratio_N))
            line = {"step": self.run.step, "point": point, "rows": rows.row_N.astype(int).tolist()}
            line |= {"desirable": rows.is_desirable_N.astype(int).tolist(), "rewards": rewards}
            self.rewards_file.write(line)

    def _pool(self, report: StepReport, seconds: float, flops: float) -> None:
        self.reports.append(report)
        self.throughput.add(report.counts, seconds, flops)

    def write_window(self) -> None:
        """Write the line of the steps since the last one, if there are any; all ranks must call it."""
        if not self.reports:
            return
        values = self._position() | values_of(self.loss, self.reports)
        values["num_tokens"] = self.num_tokens
        if self.skipped:
            values["skipped_steps"] = self.skipped
        values |= self.throughput.values(float(self.strategy.all_reduce([self.throughput.flops])[0]))
        memory = peak_memory_gib(self.strategy.device)
        values["peak_memory_gb"] = float(self.strategy.all_reduce([memory], op="max")[0])
        if self.trackers is not None and self.progress is not None:
            self._log("train", values)
            self.progress.update(self.run.step, values)
        self.last = values
        self.reports.clear()
        self.throughput.reset()

    def evaluation(self, eval_set: str | None, values: dict[str, float]) -> None:
        """Write one evaluation set's line."""
        if self.trackers is not None and self.progress is not None:
            named = {"eval_set": eval_set} if eval_set is not None else {}
            self._log("eval", {**self._position(), **named, **values})
            self.progress.evaluation(eval_set, self.run.step, values)
        for callback in self.callbacks:
            callback.on_evaluation(self.run.step, eval_set, dict(values))

    def samples(self, lines: list[Line]) -> None:
        """Write the answers of this step, and show the first of them."""
        if self.trackers is None or not lines:
            return
        self.samples_file = self.samples_file or RecordFile(Path(self.args.save_path) / SAMPLES)
        for line in lines:
            self.samples_file.write({"step": self.run.step, **line})
            self._count(SAMPLE)
        self.trackers.show_samples(self.run.step, lines)
        for text in for_log(self.run.step, lines):
            log.info("%s", text)

    def _position(self) -> dict[str, float]:
        """Return what every line starts with."""
        consumed = self.run.consumed_samples
        return {"epoch": consumed / self.rows_per_epoch, "consumed_samples": consumed}

    def finish(self, reason: str) -> None:
        """Write the line that is still open, if there is one, and the summary with why the run ended; for all ranks."""
        self.write_window()
        if self.trackers is None:
            return
        summary = self._position() | {
            "ended": reason,
            "loss": self.last.get("loss"),
            "num_tokens": self.num_tokens,
            "skipped_steps": self.skipped,
            "pairs_with_own_prompt": self.same_prompt,
            "pairs_with_equal_completion": self.same_completion,
            "seconds": self.seconds_before + time.perf_counter() - self.started,
        }
        self._log("summary", summary)
        log.info("ended at step %d: %s", self.run.step, reason)
        if self.same_prompt or self.same_completion:
            log.info(
                "mismatched pairs: %d share their prompt and %d have an equal completion under another; both are kept.",
                self.same_prompt,
                self.same_completion,
            )

    def close(self) -> None:
        """Close files, trackers and the progress display."""
        if self.progress is not None:
            self.progress.close()
        for record in (self.batches_file, self.rewards_file, self.samples_file):
            if record is not None:
                record.close()
        if self.trackers is not None:
            self.trackers.close()
