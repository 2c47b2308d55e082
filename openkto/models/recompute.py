"""Gradient checkpointing: the activations of a decoder layer, all or most of them, are computed again for the backward.

Whole keeps a layer's input alone and runs the layer twice. Selective also keeps the results of matrix products and of
attention, which is where the time goes, and computes only what lies between them again: norms, rotary positions,
activation functions, residual sums.
Source: Chen et al., arXiv:1604.06174; Korthikanti et al., arXiv:2205.05198, section 5 (selective).
"""

import functools
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

# By the operators' own names, so that those of packages that are not installed may stand here too.
KEPT = frozenset(
    {
        *("aten::mm", "aten::addmm", "aten::_grouped_mm", "aten::_scaled_dot_product_flash_attention"),
        *("aten::_scaled_dot_product_flash_attention_for_cpu", "aten::_scaled_dot_product_efficient_attention"),
        *("aten::_scaled_dot_product_cudnn_attention", "aten::_flash_attention_forward"),
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
        how["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)
    model.gradient_checkpointing_enable(how)
    if use_reentrant:
        # Reentrant checkpointing passes gradients on only where an input asks for one.
        model.enable_input_require_grads()


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator._schema.name in KEPT else CheckpointPolicy.PREFER_RECOMPUTE
