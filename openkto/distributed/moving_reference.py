"""A reference model that follows the policy, at every ZeRO stage.

Source: Gorbatovski et al., "Learn Your Reference Model for Real Good Alignment" (TR-DPO), arXiv:2404.09656v4, section
3. Every N steps the reference becomes (1 - alpha) reference + alpha policy.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
from safetensors import safe_open
from torch import Tensor, nn

from openkto.distributed.gather import whole_shape, whole_weight
from openkto.distributed.launch import is_first_rank
from openkto.distributed.tensor_parallel import split_of
from openkto.errors import ConfigError


@torch.no_grad()
def move_reference(reference: nn.Module, policy: nn.Module, alpha: float) -> None:
    """Move every parameter of the reference towards the policy's; all ranks must call it.

    Args:
        reference, policy: of the same architecture, sharded or whole alike.
        alpha: 0 leaves the reference, 1 makes it the policy.
    """
    for own, other in zip(parameters(reference).values(), parameters(policy).values(), strict=True):
        with _whole(other, modifies=False), _whole(own, modifies=True):
            moved = torch.lerp(own.data.float(), other.data.to(own.device).float(), alpha)
            own.data.copy_(moved)


def reference_weights(reference: nn.Module) -> dict[str, Tensor]:
    """Return the whole parameters on rank 0's CPU, {} elsewhere; all ranks must call it."""
    weights = {name: whole_weight(parameter, parameter.dtype) for name, parameter in parameters(reference).items()}
    return weights if is_first_rank() else {}


@torch.no_grad()
def load_reference(reference: nn.Module, file: Path) -> None:
    """Give the reference the weights that a checkpoint kept; all ranks must call it."""
    with safe_open(str(file), framework="pt") as saved:
        for name, parameter in parameters(reference).items():
            with _whole(parameter, modifies=True):
                whole, split = saved.get_tensor(name), split_of(parameter)
                parameter.data.copy_(whole if split is None else split.own_part(whole))


def is_alike(reference: nn.Module, policy: nn.Module) -> bool:
    """Whether two models have the same parameters, so that one can move towards the other."""

    def shapes(model: nn.Module) -> dict[str, torch.Size]:
        return {name: whole_shape(parameter) for name, parameter in parameters(model).items()}

    return shapes(reference) == shapes(policy)


def parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by the names that they have in the model inside an engine, or in the model itself."""
    return {name.removeprefix("module."): parameter for name, parameter in model.named_parameters()}


@contextlib.contextmanager
def _whole(parameter: nn.Parameter, *, modifies: bool) -> Iterator[None]:
    """Inside, a parameter that ZeRO-3 shards is whole, or its part is; what every rank writes into it alike is kept."""
    if not hasattr(parameter, "ds_id"):
        yield
        return
    # The rank is counted among those that shard the parameter.
    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0 if modifies else None):
        yield


def check_moves(ref_model: Any, engine: Any) -> None:
    """Raise a ConfigError where a reference cannot follow the policy."""
    if not (isinstance(ref_model, nn.Module) and is_alike(ref_model, engine)):
        got = "one with others" if isinstance(ref_model, nn.Module) else "none"
        raise ConfigError(
            "--ref_sync_steps: the reference must be a model of its own with the policy's parameters; got "
            f"{got}. Take another reference, or leave it out."
        )
