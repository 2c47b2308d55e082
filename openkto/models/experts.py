"""How a mixture-of-experts model routes tokens to experts, read from its layers: configurations name it in many ways.

transformers keeps a layer's experts in parameters of three dimensions, one expert after the other; other code keeps a
list of layers. How many of them a token meets, the router or the block around both knows.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

# What routers and their blocks call the number of experts that a token meets.
PER_TOKEN = ("top_k", "num_experts_per_tok", "num_experts_per_token", "moe_topk", "topk")
# Of one parameter for all experts: not a convolution's, which has three dimensions, too.
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
LIST_OF_EXPERTS = re.compile(r"(.*\.)?\w*experts")


class Bank(NamedTuple):
    """The experts of one layer."""

    parameters: list[nn.Parameter]
    size: int  # experts
    per_token: int  # of them, those that a token meets


def expert_banks(model: nn.Module) -> list[Bank]:
    """Return the experts of each layer of a model; a dense one has none."""
    modules = dict(model.named_modules())
    banks = []
    for name, module in modules.items():
        own = list(_experts(name, module))
        per_token = _per_token(modules, name) if own else None
        if per_token is not None:
            banks.append(Bank([p for _, p in own], max(size for size, _ in own), per_token))
    return banks


def expert_counts(model: nn.Module) -> tuple[int, int]:
    """Return (experts, experts a token) of a model's layers, zeros for a dense one; the largest where they differ."""
    banks = expert_banks(model)
    return max((bank.size for bank in banks), default=0), max((bank.per_token for bank in banks), default=0)


def _experts(name: str, module: nn.Module) -> Iterator[tuple[int, nn.Parameter]]:
    """Yield (experts, parameter) of a module that holds experts, and nothing of others."""
    if isinstance(module, nn.ModuleList) and LIST_OF_EXPERTS.fullmatch(name):
        yield from ((len(module), parameter) for parameter in module.parameters())
    elif not isinstance(module, CONVOLUTIONS):
        shapes = ((unsharded_shape(parameter), parameter) for parameter in module.parameters(recurse=False))
        yield from ((shape[0], parameter) for shape, parameter in shapes if len(shape) == 3 and shape[0] > 1)


def unsharded_shape(parameter: Tensor) -> torch.Size:
    """Return a parameter's shape, also where it is sharded."""
    # DeepSpeed's ZeRO-3 leaves an empty parameter, and its shape under this name.
    shape: torch.Size = parameter.ds_shape if hasattr(parameter, "ds_shape") else parameter.shape
    return shape


def _per_token(modules: dict[str, nn.Module], name: str) -> int | None:
    """Return the number that the module of this name, or the block around it, has for experts a token."""
    while name.endswith(".base_layer"):  # around which an adapter is
        name = name.rpartition(".")[0]
    for _ in range(2):
        for module in modules[name].modules():
            for attribute in PER_TOKEN:
                value = vars(module).get(attribute)
                if type(value) is int and value > 0:
                    return value
        name = name.rpartition(".")[0]
    return None
