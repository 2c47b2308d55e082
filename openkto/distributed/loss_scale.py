"""float16's loss scale: an overflow skips the update and halves the scale."""

import math
from typing import Any

from openkto.distributed.ds_config import SMALLEST_LOSS_SCALE
from openkto.errors import TrainingError


def step_with_loss_scale(engine: Any) -> tuple[float, bool]:
    """Step in float16; return the gradient norm and whether the update was applied.

    Raises:
        TrainingError: an overflow at the smallest scale.
    """
    at_smallest = engine.optimizer.loss_scale <= SMALLEST_LOSS_SCALE
    try:
        engine.step()
    except Exception as error:
        # DeepSpeed raises a bare Exception where the scale cannot go down any more.
        if not at_smallest:
            raise
        raise TrainingError(
            f"fp16 overflows at the smallest loss scale, {SMALLEST_LOSS_SCALE}. Use --param_dtype bf16 or fp32."
        ) from error
    applied = bool(engine.was_step_applied())
    return float(engine.get_global_grad_norm()) if applied else math.inf, applied


def loss_scale(engine: Any) -> dict[str, float]:
    """Return the scale and its counters."""
    return {name: value for name, value in vars(engine.optimizer.loss_scaler).items() if type(value) in (int, float)}
