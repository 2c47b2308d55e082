"""Warns once if a run's updates change nothing: rewards that stay exactly 0, or a gradient of 0."""

import logging
from typing import Protocol

from openkto.report.metrics import BatchRows

log = logging.getLogger(__name__)

STEPS_IN_A_ROW = 5  # in bf16 the first updates may be smaller than the weights' last bit


class Step(Protocol):
    """What is looked at of a step; `StepReport` is one."""

    @property
    def rows(self) -> BatchRows: ...

    @property
    def grad_norm(self) -> float: ...

    @property
    def applied(self) -> bool: ...

    @property
    def learning_rate(self) -> float: ...


class Standstill:
    """Looks at each step after warm-up, whose end shows in a learning rate that does not rise any more."""

    def __init__(self) -> None:
        self._last_rate, self._without_reward, self._is_said = 0.0, 0, False

    def see(self, step: int, report: Step) -> None:
        """Take one step in; warn where it is due."""
        is_warm_up = report.learning_rate > self._last_rate
        self._last_rate = report.learning_rate
        if is_warm_up or self._is_said:
            return
        self._without_reward = 0 if report.rows.log_ratio_N.any() else self._without_reward + 1
        if report.applied and report.grad_norm == 0:
            self._say(
                f"step {step}: grad_norm is 0, so nothing is learned. Look at the rows' weights (--weight_key), at "
                "--beta, and at what trains (--target_modules)."
            )
        elif self._without_reward == STEPS_IN_A_ROW:
            self._say(
                f"step {step}: all rewards have been exactly 0 in {STEPS_IN_A_ROW} steps, so the policy is still its "
                f"reference. Raise --learning_rate, which is {report.learning_rate:g} now; with --param_dtype bf16 a "
                "small one does not reach the weights for many steps."
            )

    def _say(self, text: str) -> None:
        self._is_said = True
        log.warning("warning: %s", text)
