"""float32 products on a CPU through oneDNN instead of MKL, the library that torch uses, which is fast on Intel's only.

torch's own linear layers use oneDNN only in half precision. `python -m benchmarks.limit` prints the rates of both. The
gradient of a weight, a product of two transposed matrices, stays torch's.

Shapes:  N = rows of the left matrix (any leading dimensions), K = inner size, M = columns of the product.
"""

import os
import platform
import types
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

# oneDNN, and torch beside it, keep the kernels of the last 1,024 shapes by default, and each micro-batch has another
# number of tokens; it needs some ten of them. Read when the first product is made.
for _variable in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.setdefault(_variable, "64")

CPU_INFO = Path("/proc/cpuinfo")

# One of torch's private operators; a build without it, or without oneDNN, multiplies as it always does.
_ONEDNN: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None) if torch.backends.mkldnn.is_available() else None

# An operator of our own around it, since torch.compile knows the private one only with constant weights.
torch.library.define("openkto::product", "(Tensor left_NK, Tensor right_MK, Tensor? bias_M) -> Tensor")


@torch.library.impl("openkto::product", "cpu")
def _product(left_NK: Tensor, right_MK: Tensor, bias_M: Tensor | None) -> Tensor:
    product_NM: Tensor = _ONEDNN(left_NK, right_MK, bias_M, "none", [], "")
    return product_NM


@torch.library.register_fake("openkto::product")
def _fake_product(left_NK: Tensor, right_MK: Tensor, bias_M: Tensor | None) -> Tensor:
    return left_NK.new_empty((*left_NK.shape[:-1], right_MK.shape[0]))


def linear(left_NK: Tensor, right_MK: Tensor, bias_M: Tensor | None = None) -> Tensor:
    """Return left right^T + bias, [N, M], as `torch.nn.functional.linear` does; by oneDNN without a gradient."""
    if not _takes(left_NK, right_MK):
        return F.linear(left_NK, right_MK, bias_M)
    product_NM: Tensor = torch.ops.openkto.product(left_NK, right_MK, bias_M)
    return product_NM


def _takes(left_NK: Tensor, right_MK: Tensor) -> bool:
    """Whether this is a product for oneDNN, which checks no shapes: wrong ones are left for torch to refuse."""
    return (
        _ONEDNN is not None
        and left_NK.is_cpu
        and left_NK.dtype == right_MK.dtype == torch.float32
        and left_NK.dim() > 1
        and left_NK.shape[-1] == right_MK.shape[-1]
        and left_NK.numel() > 0
        and not torch.is_autocast_enabled("cpu")
    )


class _Linear(torch.autograd.Function):
    """A linear layer; keeps of its input and weight what the gradients that are asked for need."""

    @staticmethod
    def forward(ctx: Any, input_NK: Tensor, weight_MK: Tensor, bias_M: Tensor | None) -> Tensor:
        needs_input, needs_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(input_NK if needs_weight else None, weight_MK if needs_input else None)
        product_NM: Tensor = torch.ops.openkto.product(input_NK, weight_MK, bias_M)
        return product_NM

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NM: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        input_NK, weight_MK = ctx.saved_tensors
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad
        rows_NM = grad_NM.flatten(0, -2)
        return (
            linear(grad_NM, weight_MK.t()) if needs_input else None,
            rows_NM.t() @ input_NK.flatten(0, -2) if needs_weight else None,
            rows_NM.sum(0) if needs_bias else None,
        )


def _forward(layer: nn.Linear, input_NK: Tensor) -> Tensor:
    if not _takes(input_NK, layer.weight):
        return F.linear(input_NK, layer.weight, layer.bias)
    output_NM: Tensor = _Linear.apply(input_NK, layer.weight, layer.bias)
    return output_NM


def is_faster_here() -> bool:
    """Whether linear layers are faster by oneDNN on this processor: on Intel's MKL is by a tenth.

    By the maker, not by a trial: a run that is resumed must multiply as before, to the last bit.
    """
    if platform.machine() not in ("x86_64", "AMD64") or not CPU_INFO.exists():
        return True
    return "GenuineIntel" not in CPU_INFO.read_text(encoding="utf-8", errors="replace")


def use_onednn(model: nn.Module) -> None:
    """Let the model's float32 linear layers multiply through oneDNN; those of other classes are not changed."""
    for layer in model.modules():
        # The class stays: others go by it, such as DeepSpeed where it cuts layers for tensor parallelism.
        if type(layer) is nn.Linear and layer.weight.dtype == torch.float32:
            layer.forward = types.MethodType(_forward, layer)  # type: ignore[method-assign]
