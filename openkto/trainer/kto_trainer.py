"""The training loop. Read from `fit` down: it is in the order of events.

Shapes:  B = rows in a micro-batch, N = rows in the global batch (all ranks).
Units:   nats.
"""

import tempfile
import time
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from openkto.data.loader import KTODataLoader, RankBatch
from openkto.distributed.gather import gather_weights
from openkto.distributed.strategy import StepResult
from openkto.errors import ConfigError, OpenKTOError, TrainingError
from openkto.models.loss import KTOLoss, LossType
from openkto.trainer.evaluation import evaluate_set
from openkto.trainer.forwards import (
    Strategy,
    batch_rows,
    forward_without_gradient,
    is_real,
    name_rows,
    stop_unless_finite,
    to_device,
)
from openkto.trainer.reference import make_reference
from openkto.trainer.reporter import FitArgs, Position, Reporter, StepReport
from openkto.trainer.schedule import learning_rates


class TrainingStrategy(Strategy, Protocol):
    """What the loop asks of a strategy beyond forwards; `DeepspeedStrategy` is one."""

    max_norm: float

    def set_learning_rates(self, engine: Any, rates: list[float]) -> None: ...

    def backward(self, engine: Any, loss: Tensor, *, is_last: bool) -> None: ...

    def step(self, engine: Any) -> StepResult: ...


class KTOTrainer:
    """Trains a policy with KTO.

    Args:
        model: the policy's engine, from `strategy.prepare`.
        ref_model: the frozen reference, from there too; None where the policy has an adapter, which is off then.
        tokenizer: the model's tokenizer, saved with it.
        strategy: see `TrainingStrategy`.
        optim: the optimizer that was given to `strategy.prepare`.
        train_dataloader: this rank's shares of the global batches.
        eval_dataloader: a loader over a whole set as one batch, or several by name, or None.
        scheduler: a LambdaLR, as every schedule of `transformers.get_scheduler` is.
        max_norm: must be the strategy's, which clips.
        beta, desirable_weight, undesirable_weight, loss_type: see `KTOLoss`.
        aux_loss_coef: weight of the experts' load-balancing loss.
        max_epochs: how often the rows are gone through, unless `args.max_steps` says how many steps.
        save_hf_ckpt, disable_ds_ckpt: for checkpoints during training, which this version does not write.

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
        beta: float = 0.1,
        desirable_weight: float = 1.0,
        undesirable_weight: float = 1.0,
        loss_type: LossType = "kto",
        aux_loss_coef: float = 0.0,
        max_epochs: int = 1,
        save_hf_ckpt: bool = False,
        disable_ds_ckpt: bool = False,
    ) -> None:
        if max_norm != strategy.max_norm:
            raise ConfigError(
                f"max_norm: must be the strategy's {strategy.max_norm}; got {max_norm}. Give both the same."
            )
        if save_hf_ckpt or disable_ds_ckpt:
            raise ConfigError("save_hf_ckpt, disable_ds_ckpt: this version writes no checkpoints. Leave both False.")
        self.model, self.ref_model, self.tokenizer = model, ref_model, tokenizer
        self.strategy, self.optim, self.scheduler = strategy, optim, scheduler
        self.train_dataloader = train_dataloader
        if eval_dataloader is None:
            eval_dataloader = {}
        elif not isinstance(eval_dataloader, dict):
            eval_dataloader = {"eval": eval_dataloader}
        self.eval_dataloaders: dict[str, KTODataLoader] = eval_dataloader
        if aux_loss_coef > 0 and model.module.num_experts == 0:
            raise ConfigError("aux_loss_coef: needs a mixture-of-experts model; got a dense one. Leave it 0.")
        self.reference = make_reference(model, model.module, ref_model, strategy)
        self.loss = KTOLoss(beta, desirable_weight, undesirable_weight, loss_type)
        self.aux_loss_coef = aux_loss_coef
        self.max_epochs = max_epochs
        self.num_parameters = count(model.parameters())
        self.num_trainable = count(p for p in model.parameters() if p.requires_grad)

    # ---- the loop ---------------------------------------------------------------------------------------------------

    def fit(self, args: FitArgs, consumed_samples: int = 0, num_update_steps_per_epoch: int | None = None) -> None:
        """Train until the last step, with evaluations between.

        Args:
            args: see `FitArgs`; any object with its fields serves.
            consumed_samples: rows that were trained on before; training goes on after them.
            num_update_steps_per_epoch: must be the loader's own count where given.

        Raises:
            TrainingError: a log-probability or a gradient is not finite; all ranks stop together.
        """
        loader, steps_per_epoch = self.train_dataloader, len(self.train_dataloader)
        if num_update_steps_per_epoch not in (None, steps_per_epoch):
            raise ConfigError(
                f"num_update_steps_per_epoch: the loader makes {steps_per_epoch}; got {num_update_steps_per_epoch}."
            )
        step = updates = loader.start_at(consumed_samples)
        total_steps = args.max_steps or self.max_epochs * steps_per_epoch
        last_step = min(total_steps, args.stop_after_steps or total_steps)
        sizes = (self.num_parameters, self.num_trainable)
        reporter = Reporter(args, self.strategy, *sizes, self.loss, loader, step, total_steps)
        try:
            if args.eval_at_start:
                self._evaluate_and_report(reporter, Position(step, consumed_samples, loader.num_rows))
            while step < last_step:
                started = time.perf_counter()
                for batch in loader:
                    step += 1
                    rates = learning_rates(self.scheduler, updates + 1)
                    self.strategy.set_learning_rates(self.model, rates)
                    report = self._train_step(step, batch, rates[0], args.log_entropy)
                    updates += report.applied
                    consumed_samples += report.counts.rows
                    position = Position(step, consumed_samples, loader.num_rows)
                    reporter.step(position, batch, report, time.perf_counter() - started, is_last=step == last_step)
                    if self._is_evaluation_due(args.eval_steps, step, last_step):
                        self._evaluate_and_report(reporter, position)
                    if step == last_step:
                        break
                    started = time.perf_counter()
            reporter.finish()
        except TrainingError:
            reporter.write_window()
            raise
        finally:
            reporter.close()

    def _is_evaluation_due(self, eval_steps: int, step: int, last_step: int) -> bool:
        every = eval_steps if eval_steps > 0 else len(self.train_dataloader)
        return eval_steps != 0 and (step % every == 0 or step == last_step)

    # ---- one step ---------------------------------------------------------------------------------------------------

    def _train_step(self, step: int, batch: RankBatch, learning_rate: float, with_entropy: bool) -> StepReport:
        place = f"step {step}"
        before = forward_without_gradient(self.model, self.reference, self.strategy, self.loss, batch, place)
        self.model.train()
        has_aux_loss = self.aux_loss_coef > 0
        parts, aux_loss = [], torch.zeros((), device=self.strategy.device)
        for m, ref_log_prob_B in enumerate(before.ref_log_prob):
            micro_batch = to_device(batch.matched[m], self.strategy.device)
            output = self.model(
                micro_batch["input_ids"],
                micro_batch["attention_mask"],
                micro_batch["loss_mask"],
                with_entropy=with_entropy,
                with_balancing_loss=has_aux_loss,
            )
            is_real_B, label_B = is_real(micro_batch), micro_batch["label"]
            losses_B = self.loss(output.log_prob_B - ref_log_prob_B, label_B, before.z_ref)
            # A dummy row's log-ratio is the constant 0: it has no gradient, and its loss is not reported.
            loss = losses_B.sum() / before.counts.rows
            if has_aux_loss:
                tokens = (micro_batch["attention_mask"] * is_real_B[:, None]).sum()
                part = output.balancing_loss * tokens / before.counts.matched_tokens
                loss, aux_loss = loss + self.aux_loss_coef * part, aux_loss + part.detach()
            self.strategy.backward(self.model, loss.float(), is_last=m == len(batch.matched) - 1)
            scored_B = micro_batch["loss_mask"].sum(1)
            columns = (micro_batch["row"], output.log_prob_B, ref_log_prob_B, label_B, scored_B, output.entropy_B)
            parts.append(torch.stack([c.detach().double() for c in columns], dim=1)[is_real_B])
        rows_NC = self.strategy.gather_rows(torch.cat(parts))
        rows = batch_rows(rows_NC, before)
        stop_unless_finite(place, rows_NC[:, 0], rows.log_ratio_N)
        try:
            result = self.strategy.step(self.model)
        except TrainingError as error:
            raise TrainingError(f"{place}: {error} {name_rows(rows_NC[:, 0])}") from error
        return StepReport(
            rows=rows,
            counts=before.counts,
            grad_norm=result.grad_norm,
            applied=result.applied,
            learning_rate=learning_rate,
            entropy=float(rows_NC[:, 5].sum() / rows_NC[:, 4].sum()) if with_entropy else None,
            aux_loss=float(self.strategy.all_reduce([float(aux_loss)])[0]) if has_aux_loss else None,
        )

    # ---- evaluation -------------------------------------------------------------------------------------------------

    def evaluate(self) -> dict[str, dict[str, float]]:
        """Return each evaluation set's metrics by name: a set is one batch, the same on any number of ranks.

        Raises:
            TrainingError: a log-probability is not finite.
        """
        return {
            name: evaluate_set(self.model, self.reference, self.strategy, self.loss, name, loader)
            for name, loader in self.eval_dataloaders.items()
        }

    def _evaluate_and_report(self, reporter: Reporter, position: Position) -> None:
        for name, values in self.evaluate().items():
            reporter.evaluation(position, name if len(self.eval_dataloaders) > 1 else None, values)

    # ---- the result -------------------------------------------------------------------------------------------------

    def save_model(self, folder: str, dtype: torch.dtype) -> None:
        """Write the model, or its adapter, with the tokenizer as a Hugging Face folder; all ranks must call it.

        Raises:
            TrainingError: a weight is not finite, in this dtype.
            OpenKTOError: the folder cannot be written; the model is then in a temporary folder, if that can be.
        """
        actor = self.model.module
        weights = gather_weights(self.model, actor.model, dtype, trainable_alone=actor.has_adapter)
        if self.strategy.rank != 0:
            return
        broken = [name for name, tensor in weights.items() if not bool(tensor.isfinite().all())]
        if broken:
            raise TrainingError(
                f"the trained weights: must be finite in {str(dtype).removeprefix('torch.')}; got nan or infinity in "
                f"{broken[0]} and {len(broken) - 1} more, and nothing was saved. Lower --learning_rate, or pass "
                "--export_dtype fp32."
            )
        try:
            actor.export(weights, self.tokenizer, folder, dtype)
        except OpenKTOError as error:
            # Hours of training are in these weights: any place is better than none.
            refuge = tempfile.mkdtemp(prefix="openkto-")
            actor.export(weights, self.tokenizer, refuge, dtype)
            raise OpenKTOError(
                f"{error} The trained model was saved to {refuge} instead: move it from there."
            ) from error


def count(parameters: Iterable[nn.Parameter]) -> int:
    """Return the number of weights; under ZeRO-3 a parameter's own size is that of what this rank holds of it."""
    return sum(p.ds_numel if hasattr(p, "ds_numel") else p.numel() for p in parameters)
