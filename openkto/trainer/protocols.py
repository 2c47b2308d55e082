"""What the loop asks of a strategy and of a reference; a stand-in for tests is a few lines."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from openkto.batches.micro_batch import MicroBatch
from openkto.distributed.checkpoint import KeepsEngine
from openkto.distributed.update import StepResult
from openkto.distributed.zero_options import ZeroOptions


class Strategy(Protocol):
    """What forwards ask of a strategy; `DeepspeedStrategy` is one."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def data_rank(self) -> int: ...

    @property
    def data_size(self) -> int: ...

    def reference_forward(self, ref_model: Any) -> AbstractContextManager[None]: ...

    def all_reduce(self, values: list[float] | Tensor, op: Literal["sum", "max"] = "sum") -> Tensor: ...

    def gather_rows(self, values_LC: Tensor, lines: list[int] | None = None) -> NDArray[np.float64]: ...


class Reference(Protocol):
    """Where the reference's log-probabilities come from; see `openkto/trainer/reference.py`."""

    def log_probs(
        self, micro_batches: list[MicroBatch], between: Callable[[], None], *, with_tokens: bool = False
    ) -> list[Tensor]:
        """Return each micro-batch's log-probabilities, [B] float64, without gradient; called once a batch.

        With `with_tokens` those of its scored tokens, [K] float32: what keeps only sums over rows cannot serve a loss
        that needs them.
        """
        ...


class TrainingStrategy(Strategy, KeepsEngine, Protocol):
    """What the loop asks of a strategy beyond forwards; `DeepspeedStrategy` is one."""

    max_norm: float
    zero_stage: int
    zero: ZeroOptions
    precision: Any

    @property
    def random_rank(self) -> int: ...

    def weights_for_generation(self, engine: Any) -> AbstractContextManager[None]: ...

    def loss_scale(self, engine: Any) -> dict[str, float]: ...

    def restore_loss_scale(self, engine: Any, saved: dict[str, float]) -> None: ...

    def set_learning_rates(self, engine: Any, rates: list[float]) -> None: ...

    def backward(self, engine: Any, loss: Tensor, *, is_last: bool) -> None: ...

    def step(self, engine: Any) -> StepResult: ...
