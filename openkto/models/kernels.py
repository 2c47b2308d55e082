"""Faster layers, with the same numbers up to round-off: the Liger package's kernels, and torch.compile.

Neither changes the head: token_log_probs is faster than what they have for it.
"""

import importlib

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from openkto.errors import ConfigError

# Of one layer's code: with and without gradient, an adapter on or off, one row or more, layers of several kinds. Dynamo
# gives up at 8 and continues uncompiled.
RECOMPILE_LIMIT = 64


def use_liger_layers(config: PretrainedConfig) -> None:
    """Put Liger's norms, rotary positions and SwiGLU into transformers' classes; call it before a model is made.

    It holds for every model of that kind that the process makes from then on, so for the reference too.

    Source: Hsu et al., arXiv:2410.10989v3. Its losses are off: they would take the place of our head, and
    need all positions' logits or labels.

    Raises:
        ConfigError: there is no CUDA GPU or no such package, or the package does not know the model.
    """
    if not torch.cuda.is_available():
        raise ConfigError("--use_liger_kernel: needs a CUDA GPU; got none. Leave it out.")
    try:
        known = importlib.import_module("liger_kernel.transformers.monkey_patch").MODEL_TYPE_TO_APPLY_LIGER_FN
    except ImportError as error:
        raise ConfigError(
            f"--use_liger_kernel: needs the package liger_kernel; got {error}. Run pip install liger-kernel, or leave "
            "it out."
        ) from error
    kind = config.get_text_config().model_type
    if kind not in known:
        raise ConfigError(
            f"--use_liger_kernel: needs a model that the package knows; got {kind}. Leave it out. There are: "
            f"{', '.join(sorted(known))}."
        )
    known[kind](cross_entropy=False, fused_linear_cross_entropy=False)


def compile_layers(model: nn.Module, backend: str = "inductor") -> None:
    """Let torch.compile compile each decoder layer when it first runs; parameters keep their names.

    Layers of one kind share their code, so it is compiled once, for any shape. Not the whole model: what ZeRO-3 and
    checkpointing do between layers stays outside.

    Raises:
        ConfigError: the model has no decoder layers of transformers' kind.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(
            f"--torch_compile: needs a model of decoder layers; got {type(model).__name__} without. Leave it out."
        )
    torch._dynamo.config.recompile_limit = max(RECOMPILE_LIMIT, torch._dynamo.config.recompile_limit)
    for layer in layers:
        layer.compile(backend=backend, dynamic=True)
