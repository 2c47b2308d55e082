"""Saves a run's checkpoints and resumes from them: the state of the loop in addition to the engine's."""

import json
import logging
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from openkto.batches.loader import KTODataLoader
from openkto.distributed.checkpoint import Checkpoints
from openkto.distributed.checkpoint_folder import name_of
from openkto.errors import CheckpointError, ConfigError, NoStepError, StopError
from openkto.process.stops import StopRequest
from openkto.process.watchdog import Watchdog
from openkto.report.environment import environment
from openkto.trainer.fit_args import FitArgs
from openkto.trainer.identity import check_same_run
from openkto.trainer.newest import find_checkpoint, is_instead
from openkto.trainer.reporter import Reporter, Resumed
from openkto.trainer.rng import Arrays, rng_state, set_rng_state
from openkto.trainer.run_state import RunState
from openkto.trainer.schedule import is_due

log = logging.getLogger(__name__)


class RunSaver:
    """Saves a run's checkpoints, and loads the one that it resumes from.

    Args:
        checkpoints: where they lie.
        engine, strategy, loader: the trainer's.
        args: see `FitArgs`.
        identity: what must be the same for a run to be resumed, keyed as in `identity.py`.
        total_steps: of the schedule.
        write_copy: writes a Hugging Face folder; None for no copies.
        moving_reference: a reference that follows the policy.
        stop, watchdog: the trainer's.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        engine: Any,
        strategy: Any,
        loader: KTODataLoader,
        args: FitArgs,
        *,
        identity: dict[str, Any],
        total_steps: int,
        write_copy: Callable[[str], None] | None,
        moving_reference: nn.Module | None,
        stop: StopRequest,
        watchdog: Watchdog,
    ) -> None:
        if args.save_failed_step and not checkpoints.with_engine:
            raise ConfigError("--save_failed_step: needs checkpoints; got --disable_ds_ckpt. Leave one of them out.")
        self.stop, self.watchdog, self.moving_reference = stop, watchdog, moving_reference
        self.checkpoints, self.engine, self.strategy, self.loader = checkpoints, engine, strategy, loader
        self.args, self.total_steps, self.write_copy = args, total_steps, write_copy
        self.identity = json.loads(json.dumps(identity))  # as it comes back from a checkpoint
        self.writes = checkpoints.with_engine or write_copy is not None
        self.last_save = time.monotonic()
        self.first_step = 0
        self.before_step: tuple[dict[str, Any], dict[str, float]] | None = None

    def begin(self, consumed_samples: int) -> tuple[RunState, Resumed | None]:
        """Return where the run stands, with the engine, the loader and the generators there too.

        Raises:
            CheckpointError: the checkpoint that is wanted is not complete, or is another run's.
        """
        wanted = self.args.load_checkpoint
        found = find_checkpoint(self.checkpoints, wanted)
        if found is None:
            if wanted:
                log.info(
                    "--load_checkpoint: no checkpoint in %s yet; the run starts from the beginning",
                    self.checkpoints.root,
                )
            if self.writes:
                self.checkpoints.start_afresh()
            step = self.first_step = self.loader.start_at(consumed_samples)
            run_id = self.strategy.gather_objects(uuid.uuid4().hex[:8])[0]
            return RunState(step, step, consumed_samples, not self.args.eval_at_start, run_id=run_id), None
        if consumed_samples:
            raise ConfigError(
                f"consumed_samples: must not be given with load_checkpoint, since a checkpoint has its "
                f"own; got {consumed_samples}. Leave one of them out."
            )
        check_same_run(str(found.folder), found.state["identity"], self.identity)
        arrays = self.checkpoints.load(self.engine, found, self.moving_reference)
        self.strategy.restore_loss_scale(self.engine, found.state["loss_scale"])
        run = RunState.from_json(found.state["run"])
        self.first_step = run.step
        if found.folder.resolve().parent == self.checkpoints.root.resolve():
            if found.folder.resolve().name == name_of(run.step):
                self.checkpoints.saved_step = run.step
        elif self.writes:
            self.checkpoints.start_afresh()
        self.loader.start_at(run.consumed_samples)
        place = f"rng/{self.strategy.random_rank}/"
        own = {name: array for key, array in arrays.items() if (name := _under(place, key))}
        if own:  # a rank more than before has no state of its own
            set_rng_state(own, self.strategy.device)
        window = {name: array for key, array in arrays.items() if (name := _under("window/", key))}
        continued = f", which continues {wanted}" if is_instead(found, wanted) else ""
        log.info("resumed from %s%s: %d of %d steps are done", found.folder, continued, run.step, self.total_steps)
        return run, Resumed(found.state["reporter"], window)

    # ---- after a step -----------------------------------------------------------------------------------------------

    def after_step(self, run: RunState, reporter: Reporter, *, must_save: bool) -> None:
        """Save when that is due, and end the run when any rank was asked to.

        Raises:
            StopError: to be followed by `save_before_stop`.
            CheckpointError: saving failed for the third time in a row.
        """
        is_asked, is_overdue = self._agree(self.stop.is_due(), self._is_overdue())
        if must_save or is_overdue or self._is_due(run.step):
            self.save(run, reporter)
        if is_asked:
            self._raise_stop(run)

    def stop_if_asked(self, run: RunState, *, by_signal_only: bool) -> None:
        """End the run when any rank was asked to; called between the forwards of an evaluation."""
        is_asked = self.stop.reason is not None if by_signal_only else self.stop.is_due()
        if self._agree(is_asked, False)[0]:
            self._raise_stop(run)

    def _is_due(self, step: int) -> bool:
        is_periodic = self.args.save_steps != 0
        is_end = step == self.total_steps and (is_periodic or self.args.save_every_minutes is not None)
        return is_end or is_due(self.args.save_steps, step, len(self.loader))

    def _is_overdue(self) -> bool:
        minutes = self.args.save_every_minutes
        return minutes is not None and time.monotonic() - self.last_save >= 60 * minutes

    def _agree(self, is_asked: bool, is_overdue: bool) -> tuple[bool, bool]:
        """Let all ranks do what any of them is to do."""
        any_asked, any_overdue = self.strategy.all_reduce([float(is_asked), float(is_overdue)], op="max")
        return bool(any_asked), bool(any_overdue)

    def _raise_stop(self, run: RunState) -> None:
        """Raise what ends the run on every rank, naming the request of the first rank that has one."""
        asked = enumerate(self.strategy.gather_objects(self.stop.reason))
        rank, reason = next((rank, reason) for rank, reason in asked if reason is not None)
        again = "Start the same command again" + ("." if self.args.load_checkpoint else " with --load_checkpoint.")
        kind = NoStepError if run.step == self.first_step else StopError
        raise kind(f"{reason} on rank {rank}: stopped after step {run.step} of {self.total_steps}. {again}")

    def save_before_stop(self, run: RunState, reporter: Reporter, stop: StopError) -> None:
        """Save what a stopped run resumes from.

        Raises:
            CheckpointError: it cannot be resumed.
        """
        if not self.checkpoints.with_engine:
            raise CheckpointError(f"{stop} But nothing can be resumed: --disable_ds_ckpt was given.") from stop
        if not self.save(run, reporter):
            raise CheckpointError(f"{stop} But this step's checkpoint was not saved; resume from the one before.")

    def save(self, run: RunState, reporter: Reporter) -> bool:
        """Save the run as it stands, unless that was done at this step; return whether it is saved.

        Raises:
            CheckpointError: it failed for the third time in a row.
        """
        if not self.writes:
            return False
        if self.checkpoints.saved_step == run.step:
            if run.best_step == run.step:
                self.checkpoints.mark_best(run.step)
            return True
        self.watchdog.phase(f"saving a checkpoint at step {run.step}", is_saving=True)
        state, arrays = self._contents(run, reporter, rng_state(self.strategy.device), self._loss_scale())
        # If a save fails, a later one replaces it, except for that of the best step: it is tried once more.
        for _ in range(2 if run.best_step == run.step else 1):
            is_saved = self.checkpoints.save(
                self.engine,
                run.step,
                state,
                arrays,
                moving_reference=self.moving_reference,
                write_copy=self.write_copy,
                best_step=run.best_step,
            )
            if is_saved:
                reporter.saved(self.checkpoints.root / name_of(run.step))
                break
        self.last_save = time.monotonic()
        return is_saved

    def _contents(
        self, run: RunState, reporter: Reporter, generators: Arrays, loss_scale: dict[str, float]
    ) -> tuple[dict[str, Any], Arrays]:
        """Return what a checkpoint holds besides the engine, as JSON and as arrays; all ranks must call it."""
        resumed = reporter.state()
        states = self.strategy.gather_objects((self.strategy.random_rank, generators))
        arrays = {f"rng/{rank}/{name}": array for rank, own in states for name, array in own.items()}
        arrays |= {f"window/{name}": array for name, array in resumed.arrays.items()}
        state = {
            "run": run.to_json(),
            "updates": run.updates,
            "epoch": run.consumed_samples / self.loader.num_rows,
            "seed": self.loader.seed,
            "total_steps": self.total_steps,
            "identity": self.identity,
            "reporter": resumed.values,
            "loss_scale": loss_scale,
            "zero_stage": self.strategy.zero_stage,
            "environment": environment(self.strategy.world_size, self.strategy.device),
            "settings": self.args.settings,
        }
        return state, arrays

    def _loss_scale(self) -> dict[str, float]:
        scale: dict[str, float] = self.strategy.loss_scale(self.engine)
        return scale

    # ---- a step that fails ------------------------------------------------------------------------------------------

    def note_before_step(self) -> None:
        """Note what a step changes before it can fail, where the state before a failed step is asked for."""
        if self.args.save_failed_step:
            self.before_step = rng_state(self.strategy.device), self._loss_scale()

    def save_before_failed_step(self, run: RunState, reporter: Reporter) -> None:
        """Save the run as it stood before the step that failed, if that is asked for; all ranks must call it.

        No update was made, so weights and optimizer are those of before.
        """
        if self.before_step is None:
            return
        self.watchdog.phase(f"saving the state before step {run.step}", is_saving=True)
        failed = run.step
        run.step -= 1
        state, arrays = self._contents(run, reporter, *self.before_step)
        self.checkpoints.save_before_failed_step(self.engine, failed, state, arrays, self.moving_reference)
        run.step = failed


def open_checkpoints(args: FitArgs, strategy: Any, *, with_engine: bool) -> Checkpoints:
    """Return the run's checkpoints: under `args.ckpt_path`, or beside its records."""
    return Checkpoints(
        args.ckpt_path or Path(args.save_path) / "checkpoints",
        strategy,
        max_number=args.max_ckpt_num,
        max_gigabytes=args.max_ckpt_mem,
        with_engine=with_engine,
    )


def _under(prefix: str, name: str) -> str:
    """Return what follows the prefix, or nothing where the name does not begin with it."""
    return name.removeprefix(prefix) if name.startswith(prefix) else ""
