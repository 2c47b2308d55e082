"""What a step or an evaluation reports: sums and counts over whole batches, divided once.

Shapes:  N = rows of the whole global batch (all ranks, all micro-batches).
Units:   log-ratios in nats, as the loss uses them; rewards are beta times log-ratio.
"""

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from openkto.models.loss import KTOLoss, margins, sft_loss
from openkto.report.auc import area_under_curve

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

# What float32 may make of a log-ratio, as a share of the row's sum of |token log-probabilities|.
ROUND_OFF = 1e-6


@dataclass
class BatchRows:
    """One batch's rows with the reference point that they were measured against."""

    log_prob_N: Floats
    log_ratio_N: Floats
    is_desirable_N: Bools
    weight_N: Floats  # the rows' own weights, without those of their classes
    scored_N: Floats  # completion tokens
    z_ref: float
    mismatched_mean: float | None  # None where the loss needs no z_ref
    row_N: Floats = field(default_factory=lambda: np.empty(0))  # source row numbers; none from an earlier version


@dataclass
class MetricWindow:
    """Pools the batches between two log lines."""

    loss: KTOLoss
    batches: list[BatchRows] = field(default_factory=list)

    def add(self, batch: BatchRows) -> None:
        """Take one batch in."""
        self.batches.append(batch)

    def values(self) -> dict[str, float]:
        """Return the window's metrics by their public names; a class without rows has none."""
        label_N = np.concatenate([b.is_desirable_N for b in self.batches])
        reward_N = self.loss.beta * np.concatenate([b.log_ratio_N for b in self.batches])
        log_prob_N = np.concatenate([b.log_prob_N for b in self.batches])
        loss_N = np.concatenate([self._losses(b) for b in self.batches])
        scored_N = np.concatenate([b.scored_N for b in self.batches])
        settled = [self._without_round_off(b) for b in self.batches]
        correct_N = np.concatenate([margins(*_tensors(b)).numpy() > 0 for b in settled])
        values = {"loss": float(loss_N.mean())}
        rows = np.array([len(b.log_ratio_N) for b in self.batches])
        mean_point = float(np.average([b.z_ref for b in self.batches], weights=rows))
        if self.loss.sft_loss_coef > 0 and label_N.any():
            tokens = float(scored_N[label_N].sum())
            values["sft_loss"] = float(sft_loss(torch.from_numpy(log_prob_N), torch.from_numpy(label_N), tokens))
        if self.loss.facts.needs_shift:
            values["rewards/shift"] = self.loss.beta * mean_point
        if self.loss.facts.needs_z_ref:
            values["kl"] = mean_point
            unclamped = [b.mismatched_mean for b in self.batches]
            values["kl_unclamped"] = float(np.average(np.array(unclamped, dtype=np.float64), weights=rows))
        for name, of_class_N in (("chosen", label_N), ("rejected", ~label_N)):
            if of_class_N.any():
                values[f"rewards/{name}"] = float(reward_N[of_class_N].mean())
                values[f"logps/{name}"] = float(log_prob_N[of_class_N].mean())
        if label_N.any() and not label_N.all():
            values["rewards/margins"] = values["rewards/chosen"] - values["rewards/rejected"]
            values["rewards/auc"] = area_under_curve(np.concatenate([b.log_ratio_N for b in settled]), label_N)
        values["rewards/accuracy"] = float(correct_N.mean())
        return values

    def _losses(self, batch: BatchRows) -> Floats:
        return self.loss(*_tensors(batch), torch.from_numpy(batch.weight_N)).numpy()

    def _without_round_off(self, batch: BatchRows) -> BatchRows:
        """Return the batch with 0 for log-ratios and a reference point that may be nothing but float32's round-off.

        Before the first update policy and reference are one model, and all are ties; where their forwards run other
        kernels (compiled and recomputed, or split over ranks), which row is larger would be chance.
        """
        scale_N = batch.scored_N if self.loss.facts.log_ratio == "mean" else 1.0
        bound_N = ROUND_OFF * np.abs(batch.log_prob_N) / scale_N
        return replace(
            batch,
            log_ratio_N=np.where(np.abs(batch.log_ratio_N) <= bound_N, 0.0, batch.log_ratio_N),
            z_ref=0.0 if abs(batch.z_ref) <= bound_N.mean() else batch.z_ref,
        )


def _tensors(batch: BatchRows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        torch.from_numpy(batch.log_ratio_N),
        torch.from_numpy(batch.is_desirable_N),
        torch.tensor(batch.z_ref, dtype=torch.float64),
    )
