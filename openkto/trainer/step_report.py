"""What a step gives, and the metrics of one step or of several."""

from dataclasses import dataclass

import numpy as np

from openkto.batches.loader import RankBatch
from openkto.models.loss import KTOLoss
from openkto.report.metrics import BatchRows, MetricWindow
from openkto.report.throughput import StepCounts


@dataclass(frozen=True)
class StepReport:
    """What one step gives; values are those before its update."""

    rows: BatchRows
    counts: StepCounts
    grad_norm: float
    applied: bool
    learning_rate: float
    entropy: float | None = None
    aux_loss: float | None = None


def counts_of(batch: RankBatch) -> StepCounts:
    """Return what a batch's step runs."""
    return StepCounts(
        rows=len(batch.rows),
        matched_tokens=batch.matched_tokens,
        mismatched_tokens=batch.mismatched_tokens,
        slots=batch.slots,
        same_prompt=batch.same_prompt,
        same_completion=batch.same_completion,
    )


def values_of(loss: KTOLoss, reports: list[StepReport]) -> dict[str, float]:
    """Return the metrics of some steps together, without rates and memory."""
    values = MetricWindow(loss, [report.rows for report in reports]).values()
    applied = [r.grad_norm for r in reports if r.applied]
    if applied:
        values["grad_norm"] = float(np.mean(applied))
    values["learning_rate"] = reports[-1].learning_rate
    for name in ("entropy", "aux_loss"):
        known = [getattr(r, name) for r in reports if getattr(r, name) is not None]
        if known:
            values[name] = float(np.mean(known))
    return values
