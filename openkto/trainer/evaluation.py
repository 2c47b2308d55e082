"""Evaluation: a whole set as one batch, so that its numbers depend on neither batch size nor ranks."""

from collections.abc import Callable
from typing import Any

import torch

from openkto.data.loader import KTODataLoader
from openkto.models.loss import KTOLoss
from openkto.trainer.forwards import (
    Reference,
    Strategy,
    batch_rows,
    forward,
    forward_without_gradient,
    is_real,
    stop_unless_finite,
)
from openkto.trainer.metrics import MetricWindow


@torch.no_grad()
def evaluate_set(
    model: Any,
    reference: Reference,
    strategy: Strategy,
    loss: KTOLoss,
    name: str,
    loader: KTODataLoader,
    between: Callable[[], None],
) -> dict[str, float]:
    """Return a set's metrics, the same on every rank.

    Args:
        between: called before each forward, as often on every rank.

    Raises:
        TrainingError: a log-probability is not finite.
    """
    window, place = MetricWindow(loss), f"evaluation set {name}"
    for batch in loader:
        before = forward_without_gradient(model, reference, strategy, loss, batch, place, between)
        parts = []
        for micro_batch, ref_log_prob_B in zip(batch.matched, before.ref_log_prob, strict=True):
            between()
            log_prob_B = forward(model, micro_batch, strategy.device).cpu()
            columns = (micro_batch["row"], log_prob_B, ref_log_prob_B.cpu(), micro_batch["label"])
            parts.append(torch.stack([c.double() for c in columns], dim=1)[is_real(micro_batch)])
        rows_NC = strategy.gather_rows(torch.cat(parts).to(strategy.device))
        rows = batch_rows(rows_NC, before)
        stop_unless_finite(place, rows_NC[:, 0], rows.log_ratio_N)
        window.add(rows)
    return window.values()
