"""Where the reference's log-probabilities come from: a frozen model, the policy as it started, or a cache."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from openkto.batches.micro_batch import MicroBatch
from openkto.batches.pairs import batch_keys
from openkto.data.log_prob_files import Values
from openkto.errors import ConfigError
from openkto.trainer.forwards import forward_all, is_real
from openkto.trainer.protocols import Reference, Strategy


class HasStart(Protocol):
    """A policy that can compute what it did before training; an `Actor` with an adapter is one."""

    @property
    def has_adapter(self) -> bool: ...

    def reference(self) -> AbstractContextManager[None]: ...


class ModelReference:
    """A frozen model beside the policy.

    Args:
        model: from `strategy.prepare` or `strategy.prepare_frozen`.
    """

    def __init__(self, model: Any, strategy: Strategy) -> None:
        self.model, self.strategy = model, strategy

    def log_probs(
        self, micro_batches: list[MicroBatch], between: Callable[[], None], *, with_tokens: bool = False
    ) -> list[Tensor]:
        """See `Reference`."""
        with self.strategy.reference_forward(self.model):
            return forward_all(self.model, micro_batches, self.strategy.device, between, with_tokens=with_tokens)


class AdapterReference:
    """The policy itself with its adapter off, or as the adapter was when training started: no second model.

    Args:
        model: the policy's engine, which every forward goes through, in evaluation mode.
        actor: the policy inside it.
    """

    def __init__(self, model: Any, actor: HasStart, strategy: Strategy) -> None:
        self.model, self.actor, self.strategy = model, actor, strategy

    def log_probs(
        self, micro_batches: list[MicroBatch], between: Callable[[], None], *, with_tokens: bool = False
    ) -> list[Tensor]:
        """See `Reference`."""
        with torch.no_grad(), self.actor.reference():
            return forward_all(self.model, micro_batches, self.strategy.device, between, with_tokens=with_tokens)


class CachedReference:
    """Log-probabilities that were computed before; see `openkto/trainer/reference_cache.py`. No model, no forward.

    Args:
        values: the sum over a row's scored tokens, by its `batch_keys`.
        device: the policy's.
    """

    def __init__(self, values: Values, device: torch.device) -> None:
        self.values, self.device = values, device

    def log_probs(
        self, micro_batches: list[MicroBatch], between: Callable[[], None], *, with_tokens: bool = False
    ) -> list[Tensor]:
        """See `Reference`."""
        assert not with_tokens, "a cache has no values by token, and a loss that asks for them is refused with it"
        found = [self._look_up(micro_batch) for micro_batch in micro_batches]
        if self.device.type == "cuda":
            # A copy of other memory would wait for all that the device has to do.
            found = [values_B.pin_memory() for values_B in found]
        return [values_B.to(self.device, non_blocking=True) for values_B in found]

    def _look_up(self, micro_batch: MicroBatch) -> Tensor:
        keys, real = batch_keys(micro_batch), is_real(micro_batch).tolist()
        lacking = [
            row for row, k, r in zip(micro_batch["row"].tolist(), keys, real, strict=True) if r and k not in self.values
        ]
        assert not lacking, f"a run's pairs are all computed before it starts; none of row {lacking[0]}"
        found = [self.values[key] if is_data else 0.0 for key, is_data in zip(keys, real, strict=True)]
        return torch.tensor(found, dtype=torch.float64)


def make_reference(model: Any, actor: HasStart, ref_model: Any, strategy: Strategy) -> Reference:
    """Return the reference: `ref_model`, a model or a `CachedReference`; the policy's own start where that is None.

    Raises:
        ConfigError: there is no model, and the policy has no adapter to switch off.
    """
    if isinstance(ref_model, CachedReference):
        return ref_model
    if ref_model is not None:
        return ModelReference(ref_model, strategy)
    if not actor.has_adapter:
        raise ConfigError("ref_model: may be None for a policy with an adapter; got one without. Give a reference.")
    return AdapterReference(model, actor, strategy)
