"""What a run tells: log lines, trackers, batches.jsonl and tokens.jsonl, all from rank 0.

Every rank holds a `Reporter` and calls it at the same places, since the peak memory is a maximum over ranks.
"""

import json
import logging
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from openkto.data.loader import KTODataLoader, RankBatch
from openkto.errors import ConfigError
from openkto.models.loss import KTOLoss
from openkto.trainer.environment import environment
from openkto.trainer.metrics import BatchRows, MetricWindow
from openkto.trainer.progress import Progress
from openkto.trainer.throughput import StepCounts, Throughput, peak_memory_gib
from openkto.trainer.trackers import Trackers
from openkto.values import numbered

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FitArgs:
    """The fields that `KTOTrainer.fit` reads; every one has its flag's meaning and default."""

    save_path: str = "./ckpt"
    max_steps: int | None = None
    stop_after_steps: int | None = None
    logging_steps: int = 1
    eval_steps: int = -1
    eval_at_start: bool = False
    log_batches: bool = False
    log_entropy: bool = False
    use_tensorboard: str | None = None
    use_wandb: bool = False
    wandb_org: str | None = None
    wandb_group: str | None = None
    wandb_project: str = "openkto"
    wandb_run_name: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)  # the whole run's, shown by W&B; no key among them


class Position(NamedTuple):
    """Where a run stands."""

    step: int
    consumed_samples: int
    rows_per_epoch: int

    def values(self) -> dict[str, float]:
        """Return what every line starts with."""
        return {"epoch": self.consumed_samples / self.rows_per_epoch, "consumed_samples": self.consumed_samples}


@dataclass(frozen=True)
class StepReport:
    """What one step gives; values are those before its update."""

    rows: BatchRows
    counts: StepCounts
    grad_norm: float
    applied: bool
    learning_rate: float
    entropy: float | None
    aux_loss: float | None


def set_aside(folder: Path) -> None:
    """Number an earlier run's records, so that a new run in the same folder neither mixes with them nor loses them."""
    for name in ("metrics.jsonl", "batches.jsonl", "tokens.jsonl", "tensorboard"):
        record = folder / name
        if record.exists():
            kept = record.rename(numbered(record))
            log.info("%s: an earlier run's records are kept as %s", folder, kept.name)


class Reporter:
    """Pools steps into log lines and writes them.

    Args:
        args: see `FitArgs`.
        strategy, num_parameters, num_trainable, loss, loader: the trainer's.
        first_step: steps done before; a run that starts afresh sets an earlier run's files aside.
        total_steps: of the schedule.
    """

    def __init__(
        self,
        args: Any,
        strategy: Any,
        num_parameters: int,
        num_trainable: int,
        loss: KTOLoss,
        loader: KTODataLoader,
        first_step: int,
        total_steps: int,
    ) -> None:
        self.args, self.strategy = args, strategy
        self.throughput = Throughput(num_parameters, num_trainable, strategy.world_size, strategy.device)
        self.window = MetricWindow(loss)
        self.reports: list[StepReport] = []
        self.num_tokens = self.same_prompt = self.same_completion = self.skipped = 0
        self.started = time.perf_counter()
        self.last: dict[str, float] = {}
        self.position: Position | None = None
        self.trackers: Trackers | None = None
        self.progress: Progress | None = None
        self.batches_file: Any = None
        if strategy.rank == 0:
            if first_step == 0:
                set_aside(Path(args.save_path))
            self.trackers = Trackers(args, args.settings)
            self.progress = Progress(total_steps, first_step)
            run = environment(strategy.world_size, strategy.device) | {
                "parameters": num_parameters,
                "trainable_parameters": num_trainable,
                "rows": loader.num_rows,
            }
            self.trackers.log("run", 0, run)
            if args.log_batches:
                self.batches_file = self._open_batches(loader)

    def _open_batches(self, loader: KTODataLoader) -> Any:
        folder = Path(self.args.save_path)
        try:
            with (folder / "tokens.jsonl").open("w", encoding="utf-8") as tokens:
                for i in range(loader.num_rows):
                    row = loader.dataset[i]
                    line = {name: row[name] for name in ("row", "prompt_ids", "completion_ids")}
                    if not all(row["completion_mask"]):
                        line["completion_mask"] = row["completion_mask"]
                    tokens.write(json.dumps(line) + "\n")
            return (folder / "batches.jsonl").open("w", encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"--log_batches: cannot write into {folder}; {error}. Name another --save_path."
            ) from error

    def step(self, position: Position, batch: RankBatch, report: StepReport, seconds: float, *, is_last: bool) -> None:
        """Take one step in; write a line when one is due."""
        self.window.add(report.rows)
        self.reports.append(report)
        self.throughput.add(report.counts, seconds)
        self.num_tokens += report.counts.matched_tokens
        self.same_prompt += report.counts.same_prompt
        self.same_completion += report.counts.same_completion
        self.skipped += not report.applied
        self.position = position
        self._write_batch(position.step, batch)
        if is_last or position.step % self.args.logging_steps == 0:
            self.write_window()

    def _write_batch(self, step: int, batch: RankBatch) -> None:
        if self.batches_file is None:
            return
        line = {"step": step, "rows": batch.rows.tolist(), "kl_rows": batch.kl_rows.tolist()}
        try:
            self.batches_file.write(json.dumps(line) + "\n")
            self.batches_file.flush()
        except OSError as error:
            log.warning("batches.jsonl: is off from step %d on (%s); training goes on.", step, error.strerror)
            self.batches_file = None

    def write_window(self) -> None:
        """Write the line of the steps since the last one, if there are any; all ranks must call it."""
        if not self.reports or self.position is None:
            return
        applied = [r.grad_norm for r in self.reports if r.applied]
        values = self.position.values() | self.window.values()
        if applied:
            values["grad_norm"] = float(np.mean(applied))
        values["learning_rate"] = self.reports[-1].learning_rate
        values["num_tokens"] = self.num_tokens
        for name in ("entropy", "aux_loss"):
            known = [getattr(r, name) for r in self.reports if getattr(r, name) is not None]
            if known:
                values[name] = float(np.mean(known))
        if self.skipped:
            values["skipped_steps"] = self.skipped
        values |= self.throughput.values()
        memory = peak_memory_gib(self.strategy.device)
        values["peak_memory_gb"] = float(self.strategy.all_reduce([memory], op="max")[0])
        if self.trackers is not None and self.progress is not None:
            self.trackers.log("train", self.position.step, values)
            self.progress.update(self.position.step, values)
        self.last = values
        self.window.batches.clear()
        self.reports.clear()
        self.throughput.reset()

    def evaluation(self, position: Position, eval_set: str | None, values: dict[str, float]) -> None:
        """Write one evaluation set's line."""
        if self.trackers is not None:
            named = {"eval_set": eval_set} if eval_set is not None else {}
            self.trackers.log("eval", position.step, {**position.values(), **named, **values})
            shown = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
            log.info("evaluation%s at step %d: %s", f" of {eval_set}" if eval_set else "", position.step, shown)

    def finish(self) -> None:
        """Write the summary."""
        if self.trackers is None or self.position is None:
            return
        summary = self.position.values() | {
            "loss": self.last.get("loss"),
            "num_tokens": self.num_tokens,
            "skipped_steps": self.skipped,
            "pairs_with_own_prompt": self.same_prompt,
            "pairs_with_equal_completion": self.same_completion,
            "seconds": time.perf_counter() - self.started,
        }
        self.trackers.log("summary", self.position.step, summary)
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
        if self.batches_file is not None:
            self.batches_file.close()
        if self.trackers is not None:
            self.trackers.close()
