"""ZeRO settings and what goes with them: which flag sets which keys of DeepSpeed's configuration.

None of it changes what a step computes, except the two that quantize what is sent.
Source: ZeRO (arXiv:1910.02054v3), ZeRO-Offload (2101.06840v1), ZeRO-Infinity (2104.07857v1), ZeRO++
(2306.10209v1); DeepSpeed 0.19.8 as read and measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from openkto.errors import ConfigError

# DeepSpeed's own reduce bucket, 5e8 elements, is a buffer of 1 GB in bfloat16, twice that with --overlap_comm, and a
# float32 copy of 2 GB while it is reduced. A tenth of it is still 200 MB a collective, far beyond what latency costs.
REDUCE_BUCKET = 50_000_000
# DeepSpeed leaves parameters up to this many elements whole on every rank at stage 3.
PERSISTENT = 100_000
# An adapter's matrices are small and many: gathered one by one they cost a collective each.
PERSISTENT_IN_ADAPTERS = 1_000_000
# How much of the optimizer's state is read, updated and written back at a time; DeepSpeed's 1e9 needs 16 GB of buffers.
NVME_SUB_GROUP = 100_000_000

# The keys that a flag decides where it is given, and that a user's file may set where it is not.
SIZE_FLAGS = {
    "zero_optimization.reduce_bucket_size": "--reduce_bucket_size",
    "zero_optimization.allgather_bucket_size": "--allgather_bucket_size",
    "zero_optimization.stage3_prefetch_bucket_size": "--allgather_bucket_size",
}


@dataclass(frozen=True)
class ZeroOptions:
    """What a run asks of ZeRO besides its stage; each field is the flag of its name.

    Args:
        overlap_comm: reduce gradients during the backward pass.
        reduce_bucket_size: elements reduced at a time; None follows from the model.
        allgather_bucket_size: elements of parameters gathered ahead of their use at stage 3; None is DeepSpeed's.
        zpg: ranks that keep whole parameters between them after the forward pass (hpZ), at stage 3; 1 is off.
        zero_quantized_weights: send parameters in 8 bits (qwZ), at stage 3.
        zero_quantized_gradients: send gradients in 4 bits between nodes (qgZ), at stage 3.
        adam_offload: keep the optimizer's states off the GPU.
        ref_offload: keep the reference's parameters in CPU memory, at stages 0 to 2 between its forwards.
        deepcompile: let DeepSpeed compile the policy with its own passes; needs a CUDA GPU.
        param_offload: keep the policy's parameters off the GPU, at stage 3.
        offload_nvme_path: put the optimizer's states into files in this folder; None is CPU memory. Parameters never go
            there: DeepSpeed 0.19.8 reads other values back than it wrote.
    """

    overlap_comm: bool = False
    reduce_bucket_size: int | None = None
    allgather_bucket_size: int | None = None
    zpg: int = 1
    zero_quantized_weights: bool = False
    zero_quantized_gradients: bool = False
    adam_offload: bool = False
    param_offload: bool = False
    ref_offload: bool = False
    deepcompile: bool = False
    offload_nvme_path: str | None = None


def zero_section(stage: int, options: ZeroOptions) -> dict[str, Any]:
    """Return `zero_optimization` of the policy's configuration, as far as the model need not be known."""
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": options.overlap_comm}
    if options.adam_offload:
        zero["offload_optimizer"] = in_cpu_memory()
    if options.offload_nvme_path is not None:
        zero["offload_optimizer"] |= {"device": "nvme", "nvme_path": options.offload_nvme_path}
        zero["sub_group_size"] = NVME_SUB_GROUP
    if options.param_offload:
        zero["offload_param"] = in_cpu_memory()
    if options.reduce_bucket_size is not None:
        zero["reduce_bucket_size"] = options.reduce_bucket_size
    if options.allgather_bucket_size is not None:
        key = "stage3_prefetch_bucket_size" if stage == 3 else "allgather_bucket_size"
        zero[key] = options.allgather_bucket_size
    return (
        zero
        | shared_section(options)
        | ({"zero_quantized_gradients": True} if options.zero_quantized_gradients else {})
    )


def shared_section(options: ZeroOptions) -> dict[str, Any]:
    """Return what goes for every model that is sharded, the reference too: how its parameters travel."""
    zero: dict[str, Any] = {}
    if options.zpg > 1:
        zero["zero_hpz_partition_size"] = options.zpg
    if options.zero_quantized_weights:
        zero["zero_quantized_weights"] = True
    return zero


def in_cpu_memory() -> dict[str, Any]:
    """Return where things go that are kept off the GPU; pinned, which is what a GPU copies from at full speed."""
    return {"device": "cpu", "pin_memory": torch.cuda.is_available()}


def add_sizes(zero: dict[str, Any], trained: Sequence[int], frozen: Sequence[int]) -> dict[str, Any]:
    """Return the section with the sizes that follow from the model, where no flag or file has set them.

    Args:
        zero: `zero_optimization`.
        trained, frozen: the number of elements of each parameter.
    """
    sized = dict(zero)
    sized.setdefault("reduce_bucket_size", min(REDUCE_BUCKET, sum(trained)))
    if zero["stage"] == 3:
        trains_little = sum(trained) < sum(frozen) / 10
        persistent = min(max(trained), PERSISTENT_IN_ADAPTERS) if trains_little else PERSISTENT
        sized.setdefault("stage3_param_persistence_threshold", max(PERSISTENT, persistent))
    return sized


def check_ranks(options: ZeroOptions, world_size: int) -> None:
    """Raise ConfigError where the ranks cannot be grouped as asked."""
    if world_size % options.zpg:
        raise ConfigError(
            f"--zpg: must divide the number of ranks, {world_size}; got {options.zpg}. Take the number of GPUs of a "
            "node, or leave it out."
        )


def check_device(options: ZeroOptions, device: torch.device) -> None:
    """Raise ConfigError where this machine lacks what the options need.

    Raises:
        ConfigError: quantized communication without a CUDA GPU, or NVMe without DeepSpeed's op for it.
    """
    for name, is_on in (
        ("zero_quantized_weights", options.zero_quantized_weights),
        ("zero_quantized_gradients", options.zero_quantized_gradients),
    ):
        if is_on and device.type != "cuda":
            raise ConfigError(f"--{name}: needs a CUDA GPU, whose kernels quantize; got {device.type}. Leave it out.")
    problem = missing_for_nvme() if options.offload_nvme_path is not None else ""
    if problem:
        raise ConfigError(
            f"--offload_nvme_path: needs DeepSpeed's op async_io; got {problem}. Install it, or leave the flag out to "
            "offload to CPU memory."
        )


def missing_for_nvme() -> str:
    """Return what keeps DeepSpeed's async_io from being built or loaded here, or nothing."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    try:
        builder = AsyncIOBuilder()
        if not builder.is_compatible():
            return "no libaio with its headers (Debian: libaio-dev)"
        builder.load(verbose=False)
    except Exception as error:  # a compiler's failure is raised as whatever it was
        return f"a failure to build it ({' '.join(str(error).split())[:120]})"
    return ""
