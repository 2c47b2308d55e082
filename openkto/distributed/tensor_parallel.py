"""A model's weights cut among the ranks of a tensor-parallel group, in DeepSpeed's layers (AutoTP).

DeepSpeed cuts a model by itself only inside `deepspeed.initialize`, and then not one with an adapter (0.19.8 does not
look into peft's layers). So its layers are put in here, before the optimizer is made, and its engine is told so.
"""

from typing import Any, NamedTuple

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.module_inject import LinearAllreduce, LinearLayer
from torch import Tensor, nn

from openkto.distributed.mesh import Mesh

SPLIT = "openkto_split"  # where a parameter says how it is cut
LAYERS = {"columns": (LinearLayer, 0), "rows": (LinearAllreduce, 1)}  # and the dimension of the weight that is cut


class Split(NamedTuple):
    """How a parameter is cut."""

    dim: int
    shape: torch.Size  # of the whole
    mesh: Mesh

    def own_part(self, whole: Tensor) -> Tensor:
        """Return this rank's part of a whole tensor."""
        return whole.view(self.shape).chunk(self.mesh.part_size, dim=self.dim)[self.mesh.part_rank]

    def gather(self, own: Tensor) -> Tensor:
        """Return the whole tensor of which each rank has a part; all ranks of the group must call it."""
        parts = [torch.empty_like(own, memory_format=torch.contiguous_format) for _ in range(self.mesh.part_size)]
        dist.all_gather(parts, own.detach().contiguous(), group=self.mesh.part_group)
        return torch.cat(parts, dim=self.dim)


def split_of(parameter: nn.Parameter) -> Split | None:
    """Return how a parameter is cut, or None where each rank has the whole."""
    found: Split | None = vars(parameter).get(SPLIT)
    return found


def split_model(model: Any, mesh: Mesh) -> None:
    """Cut a model's layers in place by its own plan; all ranks must call it.

    Its parameters are ordinary ones afterwards, also where ZeRO-3 had sharded them over all ranks: the engine shards
    the parts again, over the ranks that have the same part.

    Args:
        model: an `Actor`, or anything with a `split_plan`.

    Raises:
        ConfigError: it cannot be cut so.
    """
    plan = model.split_plan(mesh.part_size)
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(id(parameter), []).append((module, name))
    for name, module in list(model.named_modules()):
        for parameter in list(module.parameters(recurse=False)):
            _make_whole(parameter, owners.get(id(parameter), []))
        if plan.get(name) == "summed":
            for parameter in module.parameters():
                parameter.register_hook(lambda gradient: _summed(gradient, mesh))
        elif name in plan:
            _put_in(model, name, module, plan[name], mesh)
    model.ds_autotp_parsed = True  # what DeepSpeed's engine asks before it would cut the model itself


def _make_whole(parameter: nn.Parameter, owners: list[tuple[nn.Module, str]]) -> None:
    """Put an ordinary parameter in the places of one that ZeRO-3 has sharded."""
    if not hasattr(parameter, "ds_id"):
        return
    with deepspeed.zero.GatheredParameters([parameter]):
        whole = nn.Parameter(parameter.data.clone(), requires_grad=parameter.requires_grad)
    for module, name in owners:
        setattr(module, name, whole)


def _put_in(model: nn.Module, name: str, module: nn.Module, style: str, mesh: Mesh) -> None:
    """Put DeepSpeed's layer in a linear layer's place; it cuts the layer's parameters in place."""
    parent, _, attribute = name.rpartition(".")
    shapes = {own: parameter.shape for own, parameter in module.named_parameters()}
    kind, dim = LAYERS[style]
    layer = kind(module, mesh.part_group, name=name)
    for own, parameter in layer.named_parameters():
        if parameter.shape != shapes[own]:  # a bias of a layer cut by rows is whole
            setattr(parameter, SPLIT, Split(dim, shapes[own], mesh))
    setattr(model.get_submodule(parent), attribute, layer)


def _summed(gradient: Tensor, mesh: Mesh) -> Tensor:
    """Return the sum over the ranks that each see a part of what a whole parameter is applied to."""
    total = gradient.contiguous().clone()
    dist.all_reduce(total, group=mesh.part_group)
    return total


def total_norm(parameters: list[nn.Parameter], mesh: Mesh) -> Tensor:
    """Return the L2 norm of reduced gradients, each weight counted once; all ranks of the group must call it."""
    cut = [p.grad for p in parameters if p.grad is not None and split_of(p) is not None]
    whole = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None and split_of(p) is None])
    if mesh.cut != "weights":
        return whole
    square = nn.utils.get_total_norm(cut).square()
    dist.all_reduce(square, group=mesh.part_group)
    return (whole.square() + square).sqrt()
