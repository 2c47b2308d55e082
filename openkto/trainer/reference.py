"""Where the reference's log-probabilities come from: a frozen model of its own, or the policy as it started."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from openkto.data.loader import MicroBatch
from openkto.errors import ConfigError
from openkto.trainer.forwards import Reference, Strategy, forward_all


class HasStart(Protocol):
    """A policy that can compute what it did before training; an `Actor` with an adapter is one."""

    has_adapter: bool

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


def make_reference(model: Any, actor: HasStart, ref_model: Any, strategy: Strategy) -> Reference:
    """Return the reference: `ref_model`, or the policy's own start where that is None.

    Raises:
        ConfigError: there is no model, and the policy has no adapter to switch off.
    """
    if ref_model is not None:
        return ModelReference(ref_model, strategy)
    if not actor.has_adapter:
        raise ConfigError("ref_model: may be None for a policy with an adapter; got one without. Give a reference.")
    return AdapterReference(model, actor, strategy)
