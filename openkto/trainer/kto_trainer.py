"""The training loop. Read from `fit` down: it is in the order of events.

Shapes:  B = rows in a micro-batch, N = rows in the global batch (all ranks).
Units:   nats.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from openkto.batches.loader import KTODataLoader, RankBatch
from openkto.distributed.moving_reference import check_moves, move_reference
from openkto.distributed.update import StepResult
from openkto.errors import ConfigError, StopError, TrainingError
from openkto.models.loss import KTOLoss
from openkto.process.stops import StopRequest
from openkto.process.watchdog import Watchdog
from openkto.report.flops import actor_in, step_work
from openkto.trainer.ending import Ending
from openkto.trainer.evaluation import evaluate_set
from openkto.trainer.failed_step import facts_of, write_failed_step
from openkto.trainer.final_model import count, save_model
from openkto.trainer.fit_args import FitArgs
from openkto.trainer.forwards import forward_before_backward, forward_with_gradient, to_device
from openkto.trainer.identity import check_same_on_all_ranks, identity_of
from openkto.trainer.planning import plan_for
from openkto.trainer.prompt_reuse import settle_reuse
from openkto.trainer.protocols import TrainingStrategy
from openkto.trainer.reference import CachedReference, make_reference
from openkto.trainer.reporter import Reporter
from openkto.trainer.rows import name_rows, part_of_loss, read_rows
from openkto.trainer.run_state import RunState
from openkto.trainer.saving import RunSaver, open_checkpoints
from openkto.trainer.schedule import is_due, learning_rates, total_steps
from openkto.trainer.services import Services
from openkto.trainer.step_report import StepReport, counts_of


class KTOTrainer:
    """Trains a policy with KTO.

    Args:
        model: the policy's engine, from `strategy.prepare`.
        ref_model: the frozen reference, from there too, or a `CachedReference`; None where the policy has an adapter,
            which is off then.
        tokenizer: the model's tokenizer, saved with it.
        strategy: see `TrainingStrategy`.
        optim: the optimizer that was given to `strategy.prepare`.
        train_dataloader: this rank's shares of the global batches.
        eval_dataloader: a loader over a whole set as one batch, or several by name, or None.
        scheduler: a LambdaLR, as every schedule of `transformers.get_scheduler` is.
        max_norm: must be the strategy's, which clips.
        loss: the objective with its constants.
        loss_terms: fields of `KTOLoss` by name, such as beta or desirable_weight, over those of `loss`.
        max_epochs: passes over the rows, unless `args.max_steps` gives the number of steps.
        ref_sync_steps, ref_sync_alpha: how often and how far the reference moves towards the policy; 0 is never.
        save_hf_ckpt: with each checkpoint also save the model as a Hugging Face folder.
        disable_ds_ckpt: write no checkpoints that a run can be resumed from.
        export_dtype: of the saved model; None is the strategy's own.
        services: where checkpoints lie, who asks the run to stop, and more; see `Services`.

    Raises:
        ConfigError: the arguments contradict each other.
    """

    def __init__(
        self,
        *,
        model: Any,
        ref_model: Any,
        tokenizer: Any,
        strategy: TrainingStrategy,
        optim: Optimizer,
        train_dataloader: KTODataLoader,
        scheduler: LambdaLR,
        eval_dataloader: KTODataLoader | dict[str, KTODataLoader] | None = None,
        max_norm: float = 1.0,
        loss: KTOLoss | None = None,
        max_epochs: int = 1,
        ref_sync_steps: int = 0,
        ref_sync_alpha: float = 0.6,
        save_hf_ckpt: bool = False,
        disable_ds_ckpt: bool = False,
        export_dtype: torch.dtype | None = None,
        services: Services | None = None,
        **loss_terms: Any,
    ) -> None:
        if max_norm != strategy.max_norm:
            raise ConfigError(
                f"max_norm: must be the strategy's {strategy.max_norm}; got {max_norm}. Give both the same."
            )
        self.model, self.ref_model, self.tokenizer = model, ref_model, tokenizer
        self.strategy, self.optim, self.scheduler = strategy, optim, scheduler
        self.train_dataloader = train_dataloader
        sets = eval_dataloader or {}
        self.eval_dataloaders = sets if isinstance(sets, dict) else {"eval": sets}
        self.loss = dataclasses.replace(loss or KTOLoss(), **loss_terms)
        # A run that is resumed with others would be another run.
        self.settings = self.loss.settings() | {
            "max_norm": max_norm,
            "ref_sync_steps": ref_sync_steps,
            "ref_sync_alpha": ref_sync_alpha,
        }
        if self.loss.aux_loss_coef > 0 and model.module.num_experts == 0:
            raise ConfigError("aux_loss_coef: needs a mixture-of-experts model; got a dense one. Leave it 0.")
        self.reference = make_reference(model, model.module, ref_model, strategy)
        self.work, self.max_epochs = step_work(model.module, ref_model), max_epochs
        self.run, self.ending = RunState(), Ending(0)  # of the newest `fit`
        self.ref_sync_steps, self.ref_sync_alpha = ref_sync_steps, ref_sync_alpha
        if ref_sync_steps > 0:
            check_moves(ref_model, model)
        self.save_hf_ckpt, self.disable_ds_ckpt = save_hf_ckpt, disable_ds_ckpt
        self.export_dtype = export_dtype or model.module.model.dtype
        services = services or Services()
        self.samples, self.checkpoints, self.callbacks = services.samples, services.checkpoints, services.callbacks
        self.stop, self.owns_stop = services.stop or StopRequest(), services.stop is None
        self.watchdog = services.watchdog or Watchdog(0, strategy.rank)
        self.num_parameters = count(model.parameters())
        self.num_trainable = count(p for p in model.parameters() if p.requires_grad)

    # ---- the loop ---------------------------------------------------------------------------------------------------

    def fit(self, args: FitArgs, consumed_samples: int = 0, num_update_steps_per_epoch: int | None = None) -> None:
        """Train until the last step, with evaluations and checkpoints between.

        Args:
            args: see `FitArgs`; any object with its fields serves.
            consumed_samples: rows trained on before; training resumes after them. A checkpoint holds its own count.
            num_update_steps_per_epoch: must be the loader's own count where given.

        Raises:
            TrainingError: a log-probability or a gradient is not finite; all ranks stop together.
            StopError: a signal or the time limit asked to stop; all ranks do after the same step, with a checkpoint.
            CheckpointError: the checkpoint to resume from is incomplete or another run's, or saving failed three times.
        """
        self._tell_loaders()
        loader, steps_per_epoch = self.train_dataloader, len(self.train_dataloader)
        if num_update_steps_per_epoch not in (None, steps_per_epoch):
            raise ConfigError(
                f"num_update_steps_per_epoch: the loader makes {steps_per_epoch}; got {num_update_steps_per_epoch}."
            )
        total_steps = self.total_steps(args.max_steps)
        ending = self.ending = Ending(total_steps, args.stop_after_steps, args.keep_best, args.early_stop_patience)
        saver = self._make_saver(args, total_steps)
        run, resumed = saver.begin(consumed_samples)
        self.run, run.is_cached = run, isinstance(self.reference, CachedReference)
        settle_reuse(run, loader, self.model, self.strategy, is_new=resumed is None)
        run.is_evaluated &= resumed is not None or self.samples is None
        self.stop.begin_training()
        sizes = (self.num_parameters, self.num_trainable, self.work)
        reporter = Reporter(args, self.strategy, *sizes, self.loss, loader, total_steps, run, self.callbacks, resumed)
        with self.stop if self.owns_stop else contextlib.nullcontext():
            try:
                if not run.is_evaluated:
                    # --max_time is ignored here: an evaluation longer than the limit would be restarted on every start
                    # and never finish.
                    results = self._evaluate_and_report(args, run, reporter, saver, by_signal_only=True)
                    if ending.note(run, results):
                        saver.save(run, reporter)
                while not ending.is_reached(run):
                    started = self._wait_for_batch(run.step + 1)
                    for batch in loader:
                        self._step_and_report(args, run, reporter, saver, batch, started)
                        is_best = False
                        if self._is_evaluation_due(args.eval_steps, run.step, total_steps):
                            is_best = ending.note(run, self._evaluate_and_report(args, run, reporter, saver))
                        saver.after_step(run, reporter, must_save=is_best or ending.is_before_last_step(run))
                        if ending.is_reached(run):
                            break
                        started = self._wait_for_batch(run.step + 1)
                if args.eval_steps != 0 and not self._is_evaluation_due(args.eval_steps, run.step, total_steps):
                    # Only after --stop_after_steps; cut from metrics.jsonl again on resume.
                    self._evaluate_and_report(args, run, reporter, saver)
                reporter.finish(ending.reason(run))
            except StopError as stop:
                saver.save_before_stop(run, reporter, stop)
                raise
            except TrainingError:
                reporter.write_window()
                raise
            finally:
                reporter.close()

    def total_steps(self, max_steps: int | None) -> int:
        """Return the length of the run, in steps."""
        return total_steps(len(self.train_dataloader), self.max_epochs, max_steps)

    def _tell_loaders(self) -> None:
        """Let the loaders plan for how the policy and the reference run rows."""
        others = [actor for actor in [actor_in(self.ref_model)] if actor is not None]
        plan_for(
            [self.train_dataloader, *self.eval_dataloaders.values()],
            self.model.module,
            *others,
            reference_runs=not isinstance(self.reference, CachedReference),
            by_token=self.loss.facts.by_token,
            with_balancing_loss=self.loss.aux_loss_coef > 0,
            precision=self.strategy.precision,
        )

    def _make_saver(self, args: FitArgs, total_steps: int) -> RunSaver:
        checkpoints = self.checkpoints or open_checkpoints(args, self.strategy, with_engine=not self.disable_ds_ckpt)
        identity = self.settings | identity_of(self.model.module, self.train_dataloader, total_steps) | args.identity
        check_same_on_all_ranks(self.strategy, identity, self.train_dataloader)
        return RunSaver(
            checkpoints,
            self.model,
            self.strategy,
            self.train_dataloader,
            args,
            identity=identity,
            total_steps=total_steps,
            write_copy=self._save_copy if self.save_hf_ckpt else None,
            moving_reference=self.ref_model if self.ref_sync_steps > 0 else None,
            stop=self.stop,
            watchdog=self.watchdog,
        )

    def _wait_for_batch(self, step: int) -> float:
        """Say that the loader is at work, not what came before; return the time at which a step begins."""
        self.watchdog.phase(f"making the batch of step {step}")
        return time.perf_counter()

    def _step_and_report(
        self, args: FitArgs, run: RunState, reporter: Reporter, saver: RunSaver, batch: RankBatch, started: float
    ) -> None:
        saver.note_before_step()
        run.step += 1
        self.watchdog.phase(f"step {run.step}")
        rates = learning_rates(self.scheduler, run.updates + 1)
        self.strategy.set_learning_rates(self.model, rates)
        try:
            report = self._train_step(args, run, batch, rates[0])
        except TrainingError:
            saver.save_before_failed_step(run, reporter)
            reporter.failed_step(batch)
            raise
        run.count(report.counts.rows, report.rows.log_ratio_N if self.loss.facts.needs_shift else None, report.applied)
        if self.ref_sync_steps > 0 and run.step % self.ref_sync_steps == 0:
            move_reference(self.ref_model, self.model, self.ref_sync_alpha)
        reporter.step(batch, report, time.perf_counter() - started)

    # ---- one step ---------------------------------------------------------------------------------------------------

    def _train_step(self, args: FitArgs, run: RunState, batch: RankBatch, learning_rate: float) -> StepReport:
        place, shift = f"step {run.step}", run.shift or 0.0
        before = forward_before_backward(
            self.model, self.reference, self.strategy, self.loss, batch, self.watchdog.beat, shift, args.log_entropy
        )
        self.model.train()
        parts, aux_loss = [], torch.zeros((), device=self.strategy.device)
        for m, ref_log_prob in enumerate(before.ref_log_prob):
            self.watchdog.beat()
            micro_batch = to_device(batch.matched[m], self.strategy.device)
            if not before.outputs:
                before.outputs.append(forward_with_gradient(self.model, self.loss, micro_batch, args.log_entropy))
            part = part_of_loss(self.loss, batch, micro_batch, before.outputs.pop(0), ref_log_prob, before)
            self.strategy.backward(self.model, part.loss, is_last=m == len(batch.matched) - 1)
            parts.append(part.columns)
            aux_loss += part.aux_loss
        try:
            rows, columns = read_rows(self.strategy, batch, parts, before, place)
            result = self._update(rows.row_N, place)
        except TrainingError as error:
            facts = facts_of(run, learning_rate, self.model.module.model.dtype, error)
            data = self.train_dataloader.dataset
            write_failed_step(Path(args.save_path), self.strategy, data, batch, parts, before, facts)
            raise
        return StepReport(
            rows=rows,
            counts=counts_of(batch),
            grad_norm=result.grad_norm,
            applied=result.applied,
            learning_rate=learning_rate,
            entropy=float(columns["entropy"].sum() / rows.scored_N.sum()) if args.log_entropy else None,
            aux_loss=float(self.strategy.all_reduce(aux_loss[None])[0]) if self.loss.aux_loss_coef > 0 else None,
        )

    def _update(self, row_N: NDArray[np.float64], place: str) -> StepResult:
        try:
            return self.strategy.step(self.model)
        except TrainingError as error:
            raise TrainingError(f"{place}: {error} {name_rows(row_N)}") from error

    # ---- evaluation -------------------------------------------------------------------------------------------------

    def evaluate(self) -> dict[str, dict[str, float]]:
        """Return each evaluation set's metrics by name: a set is one batch, the same on any number of ranks.

        Raises:
            TrainingError: a log-probability is not finite.
        """
        self._tell_loaders()
        return self._evaluate(self.run, self.watchdog.beat)

    def _evaluate(self, run: RunState, between: Callable[[], None]) -> dict[str, dict[str, float]]:
        return {
            name: evaluate_set(self.model, self.reference, self.strategy, self.loss, name, loader, between, run.shift)
            for name, loader in self.eval_dataloaders.items()
        }

    def _is_evaluation_due(self, eval_steps: int, step: int, total_steps: int) -> bool:
        is_end = step == total_steps and (eval_steps != 0 or self.samples is not None)
        return is_end or is_due(eval_steps, step, len(self.train_dataloader))

    def _evaluate_and_report(
        self, args: FitArgs, run: RunState, reporter: Reporter, saver: RunSaver, *, by_signal_only: bool = False
    ) -> dict[str, dict[str, float]]:
        """Evaluate and sample; a request to stop ends that between two forwards, and a resumed run makes it again."""

        def between() -> None:
            self.watchdog.beat()
            saver.stop_if_asked(run, by_signal_only=by_signal_only)

        self.watchdog.phase(f"evaluation at step {run.step}")
        run.is_evaluated = False
        is_asked_for = args.eval_at_start if run.step == 0 else args.eval_steps != 0
        results = self._evaluate(run, between) if is_asked_for else {}
        answers = [] if self.samples is None else self.samples.take(self.model, self.strategy, self.watchdog, between)
        for name, values in results.items():
            reporter.evaluation(name if len(results) > 1 else None, values)
        reporter.samples(answers)
        run.is_evaluated = True
        return results

    # ---- the result -------------------------------------------------------------------------------------------------

    def save_model(self, folder: str, dtype: torch.dtype | None = None) -> None:
        """Write the model, or its adapter, with the tokenizer as a Hugging Face folder; all ranks must call it.

        Args:
            dtype: of the saved weights; None is `export_dtype`.

        Raises:
            TrainingError: a weight is not finite, in the dtype of the saved model.
            OpenKTOError: the folder cannot be written; the model is then in a temporary folder, if that can be.
        """
        save_model(self.model, self.strategy, self.tokenizer, folder, dtype or self.export_dtype, has_refuge=True)

    def _save_copy(self, folder: str) -> None:
        save_model(self.model, self.strategy, self.tokenizer, folder, self.export_dtype, has_refuge=False)
