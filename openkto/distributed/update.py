"""An engine's update: clipped, and made only with a finite gradient."""

import math
from typing import Any, NamedTuple

from openkto.distributed.ds_config import SMALLEST_LOSS_SCALE
from openkto.distributed.mesh import Mesh
from openkto.distributed.tensor_parallel import total_norm
from openkto.errors import TrainingError


class StepResult(NamedTuple):
    """What an optimizer step did."""

    grad_norm: float  # over all ranks and parameters, before clipping; not finite where the step was skipped
    applied: bool  # False where float16 overflowed


def step(engine: Any, mesh: Mesh, zero_stage: int) -> StepResult:
    """Step in float32 or bfloat16.

    Raises:
        TrainingError: a gradient is not finite.
    """
    own_norm = None
    if zero_stage == 0:
        # DeepSpeed has no norm here and would apply a NaN; the gradients are already reduced.
        own_norm = float(total_norm(list(engine.module.parameters()), mesh))
        if not math.isfinite(own_norm):
            raise _not_finite(own_norm)
    engine.step()
    norm = own_norm if own_norm is not None else engine.get_global_grad_norm()
    grad_norm = float(norm) if norm is not None else math.nan
    if not engine.was_step_applied() or not math.isfinite(grad_norm):
        raise _not_finite(grad_norm)
    return StepResult(grad_norm, True)


def _not_finite(norm: float) -> TrainingError:
    return TrainingError(f"the gradient is not finite (norm {norm}); the update was not made.")


def step_with_loss_scale(engine: Any) -> StepResult:
    """Step in float16, where an overflow skips the update and halves the scale.

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
    return StepResult(float(engine.get_global_grad_norm()) if applied else math.inf, applied)


def loss_scale(engine: Any) -> dict[str, float]:
    """Return float16's scale and its counters."""
    return {name: value for name, value in vars(engine.optimizer.loss_scaler).items() if type(value) in (int, float)}
