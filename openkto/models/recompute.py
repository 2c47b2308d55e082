"""Gradient checkpointing: all or most activations of a decoder layer are recomputed in the backward pass.

Full checkpointing keeps only a layer's input and runs the layer twice. Selective also keeps the results of matrix
products and of attention, which is where the time goes, and computes only what lies between them again: norms, rotary
positions, activation functions, residual sums.
Source: Chen et al., arXiv:1604.06174v2; Korthikanti et al., arXiv:2205.05198v1, section 5 (selective).
"""

from collections import defaultdict, deque
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel

# By the operators' own names, so that those of packages that are not installed may stand here too.
KEPT = frozenset(
    {
        *("aten::mm", "aten::addmm", "aten::_grouped_mm", "openkto::product"),
        *("aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_flash_attention_for_cpu"),
        *("aten::_scaled_dot_product_efficient_attention", "aten::_scaled_dot_product_cudnn_attention"),
        "aten::_flash_attention_forward",
        *("torch_attn::_varlen_attn", "flash_attn::_flash_attn_forward", "flash_attn::_flash_attn_varlen_forward"),
        *("flash_attn_3::fwd", "flash_attn_3::_flash_attn_forward"),
    }
)


def recompute_activations(model: PreTrainedModel, *, selective: bool = False, use_reentrant: bool = False) -> None:
    """Turn gradient checkpointing on.

    Args:
        selective: keep what `KEPT` names.
        use_reentrant: torch's older form, which cannot be selective.
    """
    assert not (selective and use_reentrant), "reentrant checkpointing recomputes everything"
    how: dict[str, Any] = {"use_reentrant": use_reentrant}
    if selective:
        how["context_fn"] = keep_and_reuse
    model.gradient_checkpointing_enable(how)
    if use_reentrant:
        # Reentrant checkpointing passes gradients on only where an input asks for one.
        model.enable_input_require_grads()


def keep_and_reuse() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Return what a layer's first run, and the one in the backward, are made in.

    Not torch's `create_selective_checkpoint_contexts`: that wants the same operators in both runs, and under ZeRO-3
    they differ by what is gathered then.
    """
    kept: Kept = defaultdict(deque)
    return _Keep(kept), _Reuse(kept)


# By operator, in the order of their runs: the results, with the version that tells of a change in place.
Kept = defaultdict[str, deque[Any]]


class _Keep(TorchDispatchMode):
    def __init__(self, kept: Kept) -> None:
        super().__init__()
        self.kept = kept

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        name = operator._schema.name
        if name in KEPT:
            self.kept[name].append(tree_map(_with_version, result))
        return result


class _Reuse(TorchDispatchMode):
    def __init__(self, kept: Kept) -> None:
        super().__init__()
        self.kept = kept

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = operator._schema.name
        if name not in KEPT:
            return operator(*args, **(kwargs or {}))
        return tree_map(_unchanged, self.kept[name].popleft(), is_leaf=lambda one: isinstance(one, _Versioned))


class _Versioned:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.version = tensor, tensor._version


def _with_version(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    # Below autograd views are not tracked unless asked for, and the version would not be shared.
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return _Versioned(value.detach())


def _unchanged(value: Any) -> Any:
    if not isinstance(value, _Versioned):
        return value
    assert value.tensor._version == value.version, "a layer changes a product's result in place: recompute the whole"
    return value.tensor
