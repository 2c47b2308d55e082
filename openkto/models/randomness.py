"""Turns dropout off: KTO compares a policy with a reference, and noise in either is noise in the reward."""

import types
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers import PreTrainedModel


@dataclass
class Changes:
    """Settings of a model's layers and configuration that are 0 now, and what they were."""

    found: list[tuple[Any, str, float]] = field(default_factory=list)  # (holder, name, value)

    def make(self) -> None:
        """Set them to 0."""
        for holder, name, _ in self.found:
            setattr(holder, name, 0.0)

    def take_back(self) -> None:
        """Set them to what they were."""
        for holder, name, value in self.found:
            setattr(holder, name, value)

    def of(self, holder: Any) -> dict[str, float]:
        """Return what those of one holder were, by name."""
        return {name: value for one, name, value in self.found if one is holder}


def disable_randomness(model: PreTrainedModel) -> Changes:
    """Switch off every dropout, layer drop and router jitter of a model, so that two forwards agree in any mode.

    Rates of dropout become 0. A layer with a rate of jitter is kept in evaluation instead: some read it there, too, as
    a threshold (Phi-MoE's sparsemixer). Some models read rates from their configuration in every forward, so it is
    changed as well.
    """
    changes = Changes()
    for module in model.modules():
        if isinstance(module, nn.Dropout) and module.p != 0.0:
            changes.found.append((module, "p", module.p))
        rates = _rates(module)
        changes.found += [(module, name, value) for name, value in rates.items() if "jitter" not in name]
        if any("jitter" in name for name in rates):
            module.train = types.MethodType(_stay_in_evaluation, module)  # type: ignore[method-assign]
            module.training = False
    changes.found += [(model.config, name, value) for name, value in _rates(model.config).items()]
    changes.make()
    return changes


def _stay_in_evaluation(module: nn.Module, mode: bool = True) -> nn.Module:
    """Set the mode of the modules inside a module, but not its own."""
    nn.Module.train(module, mode)
    module.training = False
    return module


def _rates(holder: object) -> dict[str, float]:
    """Return a module's or configuration's own rates of dropout or jitter that are not 0, by name."""
    return {
        name: value
        for name, value in vars(holder).items()
        if isinstance(value, float) and value != 0.0 and ("drop" in name or "jitter" in name)
    }
