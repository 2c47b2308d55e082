"""Evaluation: a whole set as one batch, so that its numbers depend on neither batch size nor ranks."""

from collections.abc import Callable
from typing import Any

import torch

from openkto.batches.loader import KTODataLoader
from openkto.models.loss import KTOLoss
from openkto.report.metrics import MetricWindow
from openkto.trainer.forwards import forward_without_gradient, to_device
from openkto.trainer.protocols import Reference, Strategy
from openkto.trainer.rows import read_rows, row_columns


@torch.no_grad()
def evaluate_set(
    model: Any,
    reference: Reference,
    strategy: Strategy,
    loss: KTOLoss,
    name: str,
    loader: KTODataLoader,
    between: Callable[[], None],
    shift: float | None = None,
) -> dict[str, float]:
    """Return a set's metrics, the same on every rank.

    Args:
        between: called before each forward, as often on every rank.
        shift: nats: the reference point of a loss that takes it from training; None takes the set's own mean.

    Raises:
        TrainingError: a log-probability is not finite.
    """
    window, place = MetricWindow(loss), f"evaluation set {name}"
    for batch in loader:
        before = forward_without_gradient(
            model, reference, strategy, loss, batch, between, shift or 0.0, with_matched=True
        )
        parts = []
        for micro_batch, log_prob, ref_log_prob in zip(
            batch.matched, before.log_prob, before.ref_log_prob, strict=True
        ):
            on_device = to_device(micro_batch, strategy.device)
            mask_BT = on_device["loss_mask"]
            log_ratio_B = loss.log_ratios(log_prob, ref_log_prob, mask_BT)
            parts.append(row_columns(on_device, loss.row_log_probs(log_prob, mask_BT), log_ratio_B))
        rows, _ = read_rows(strategy, batch, parts, before, place)
        if loss.facts.needs_shift and shift is None:
            rows.z_ref = float(rows.log_ratio_N.mean())
        window.add(rows)
    return window.values()
