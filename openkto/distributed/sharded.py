"""Helpers for ZeRO 3: loading a sharded model, calling it without its engine, freeing it."""

import contextlib
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import deepspeed
import deepspeed.utils.groups as groups
import torch
from deepspeed.runtime.zero.parameter_offload import ZeROOrderedDict
from torch import nn
from transformers.integrations import HfDeepSpeedConfig
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from openkto.distributed.gather import whole_shape


@contextlib.contextmanager
def born_sharded(config: dict[str, Any], zpg: int) -> Iterator[None]:
    """Models loaded inside are born sharded, so that no rank ever holds a whole one.

    Args:
        config: DeepSpeed's, of stage 3.
        zpg: see `ZeroOptions`.
    """
    # Their weights are cut afterwards; told of it, transformers would refuse to convert some files.
    alive = HfDeepSpeedConfig({key: value for key, value in config.items() if key != "tensor_parallel"})
    try:
        with one_hpz_group() if zpg > 1 else contextlib.nullcontext():
            yield
    finally:
        del alive
        unset_hf_deepspeed_config()


@contextlib.contextmanager
def one_hpz_group() -> Iterator[None]:
    """Let DeepSpeed make the ranks' groups of --zpg once.

    0.19.8 makes them for each model that is born sharded, and raises at the second, which is the reference.
    """
    make = groups._create_zero_param_parallel_group

    def make_once(size: int) -> None:
        if groups._get_zero_param_intra_parallel_group() is None:
            make(size)

    groups._create_zero_param_parallel_group = make_once
    try:
        yield
    finally:
        groups._create_zero_param_parallel_group = make


@contextlib.contextmanager
def direct_forward(model: nn.Module) -> Iterator[None]:
    """Inside, the model may be called without its engine.

    At ZeRO 3 a layer may take another one's parameters (DoRA takes those of LoRA's layers), which DeepSpeed fetches
    only while it believes that its engine runs.
    """
    sharded = [m._parameters for m in model.modules() if isinstance(m._parameters, ZeROOrderedDict)]
    for parameters in sharded:
        parameters._in_forward = True
    try:
        yield
    finally:
        for parameters in sharded:
            parameters._in_forward = False


def empty(model: nn.Module) -> None:
    """Take the memory of a model's parameters back: whoever still holds it, such as a hook, holds nothing of size."""
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data = tensor.data.new_empty(0)
        for shard in ("ds_tensor", "ds_secondary_tensor"):  # the second only with --zpg
            if vars(tensor).get(shard) is not None:
                vars(tensor)[shard].data = vars(tensor)[shard].data.new_empty(0)


def fits_whole(model: nn.Module, device: torch.device) -> bool:
    """Whether all of a sharded model's weights fit into half of a device's free memory."""
    if device.type != "cuda":
        return True  # processors' memory holds the optimizer's states too, which are far larger
    needed = sum(whole_shape(parameter).numel() * parameter.element_size() for parameter in model.parameters())
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    return 2 * needed <= free - torch.cuda.memory_allocated(device)


@contextlib.contextmanager
def whole_weights(engine: Any) -> Iterator[None]:
    """Inside, every rank holds all weights of a ZeRO-3 engine, and `engine.module` may be called without it.

    The hooks by which DeepSpeed gathers a layer before its forward are off: they would give the layer's weights back
    after it, and its record of the order in which a step needs them would be lost. All ranks must call it.
    """
    model: nn.Module = engine.module
    # What was fetched ahead by the last forward is on its way still.
    engine.optimizer.parameter_offload.get_param_coordinator()._clean_inflight_param_registry()
    hooks = [(module, module._forward_pre_hooks, module._forward_hooks) for module in model.modules()]
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        for module, _, _ in hooks:
            module._forward_pre_hooks, module._forward_hooks = OrderedDict(), OrderedDict()
        try:
            yield
        finally:
            for module, before, after in hooks:
                module._forward_pre_hooks, module._forward_hooks = before, after
