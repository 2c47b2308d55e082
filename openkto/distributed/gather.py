"""Gathers whole weights on rank 0's CPU, at every ZeRO stage and parallelism, and rows of numbers from all ranks."""

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param
from torch import Tensor, nn

from openkto.distributed.launch import is_first_rank
from openkto.distributed.mesh import Mesh
from openkto.distributed.tensor_parallel import split_of


def whole_shape(parameter: nn.Parameter) -> torch.Size:
    """Return a parameter's own shape, also where ZeRO-3 has taken its data away or other ranks have parts of it."""
    split = split_of(parameter)
    if split is not None:
        return split.shape
    shape: torch.Size = parameter.ds_shape if hasattr(parameter, "ds_shape") else parameter.shape
    return shape


def gather_weights(module: nn.Module, dtype: torch.dtype, *, trainable_only: bool = False) -> dict[str, Tensor]:
    """Return the state dict of `module`, a model or a part of one in an engine, in `dtype` on rank 0; {} elsewhere.

    Args:
        trainable_only: leave out what does not train, buffers too.

    All ranks must call it: under ZeRO-3 each parameter is gathered in turn, so no rank holds more than one whole
    parameter but rank 0 on its CPU. float32 comes from the optimizer's masters where training ran in a half.
    Tied parameters share a tensor in the result as they do in the model.
    """
    weights: dict[str, Tensor] = {}
    seen: dict[int, Tensor] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if trainable_only and not parameter.requires_grad:
            continue
        if id(parameter) not in seen:
            seen[id(parameter)] = whole_weight(parameter, dtype)
        weights[name] = seen[id(parameter)]
    if trainable_only:
        return weights if is_first_rank() else {}
    passing = _non_persistent(module)
    weights.update({name: buffer.detach().cpu() for name, buffer in module.named_buffers() if name not in passing})
    return weights if is_first_rank() else {}


def whole_weight(parameter: nn.Parameter, dtype: torch.dtype) -> Tensor:
    """Return a parameter in `dtype` on rank 0's CPU, nothing elsewhere; all ranks must call it."""
    if dtype == torch.float32 and parameter.dtype != torch.float32 and parameter.requires_grad:
        master = safe_get_full_fp32_param(parameter)
        if master is not None:
            return _to_cpu(parameter, master, dtype)
    if not hasattr(parameter, "ds_id"):
        return _to_cpu(parameter, parameter, dtype)
    with deepspeed.zero.GatheredParameters([parameter]):
        return _to_cpu(parameter, parameter, dtype)


def _to_cpu(parameter: nn.Parameter, own: Tensor, dtype: torch.dtype) -> Tensor:
    split = split_of(parameter)
    tensor = own if split is None else split.gather(own)
    if not is_first_rank():
        return torch.empty(0)
    kept = dtype if tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to("cpu", kept, copy=True)


def _non_persistent(module: nn.Module) -> set[str]:
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, part in module.named_modules()
        for name in part._non_persistent_buffers_set
    }


def gather_lines(values_LC: Tensor, lines: list[int] | None, mesh: Mesh) -> np.ndarray:
    """Return all shares' lines one below the other, [N, C] float64; see `DeepspeedStrategy.gather_rows`."""
    if lines is None:
        count = torch.tensor([len(values_LC)], dtype=torch.int64, device=values_LC.device)
        counts = [torch.empty_like(count) for _ in range(mesh.data_size)]
        dist.all_gather(counts, count, group=mesh.data_group)
        lines = [int(c) for c in counts]
    padded = torch.zeros(max(lines), values_LC.shape[1], dtype=torch.float64, device=values_LC.device)
    padded[: len(values_LC)] = values_LC
    parts = [torch.empty_like(padded) for _ in range(mesh.data_size)]
    dist.all_gather(parts, padded, group=mesh.data_group)
    return torch.cat([p[:n] for p, n in zip(parts, lines, strict=True)]).cpu().numpy()
