"""The one model of memory: the bytes that a training run takes on one rank, by part.

The moments that can be a rank's highest are the forwards without gradient, the backward of the largest micro-batch and
the update. What a model's own code holds is counted (`activations.py`); what DeepSpeed 0.19.8 holds
beside it are its copies, buckets and gathered parameters, as they were measured (docs/memory.md).

Units:   bytes; parameters in elements.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from openkto.distributed.zero_options import ZeroOptions, add_sizes, zero_section
from openkto.planning.activations import Activations, Device, Recomputation

Reference = Literal["cached", "model", "adapter"]
PARTS = ("weights", "gradients", "optimizer", "reference", "activations", "logits", "buffers", "libraries")

ELEMENT = {"fp32": 4, "bf16": 2, "fp16": 2}
FLOAT = 4
MOMENTS = 8
# QLoRA's 4-bit NormalFloat with double quantization (arXiv:2305.14314v1, section 3), in bytes.
IN_4_BITS = (4 + 8 / 64 + 32 / (64 * 256)) / 8
# Of DeepSpeed's configuration: the elements that stage 3 gathers, and those that stage 0 reduces in one call.
LIVE, ALL_REDUCE = 10**9, 5 * 10**8
# Assumed, not measured: a GPU's context, NCCL, kernels' workspaces and what the allocator cannot hand out.
ON_GPU = 4e9
# Measured: a process that has imported everything, with a tokenizer and its rows.
ON_CPU = 500 * 2**20


@dataclass(frozen=True)
class Sizes:
    """What of a model takes memory.

    Args:
        trained, frozen: the elements of each parameter.
        reference: the elements of a reference that is a model of its own.
        training: what a micro-batch takes with gradient, by recomputation.
        forward: what one takes without gradient, at most.
        in_4_bits: of the frozen elements, those that are loaded so.
    """

    trained: tuple[int, ...]
    frozen: tuple[int, ...]
    reference: int
    training: Mapping[Recomputation, Activations] = field(repr=False)
    forward: Activations = field(repr=False)
    in_4_bits: int = 0

    @property
    def num_trained(self) -> int:
        """The parameters that train."""
        return sum(self.trained)

    @property
    def numel(self) -> int:
        """All parameters."""
        return sum(self.trained) + sum(self.frozen)


@dataclass(frozen=True)
class Way:
    """How a run is laid out, as far as it takes memory; named as the settings are, except `recomputation`.

    Args:
        ranks: that share optimizer states, gradients and parameters.
        options: how ZeRO shards, moves and packs.
    """

    zero_stage: int
    ranks: int
    precision: str = "bf16"
    recomputation: Recomputation = "none"
    reference: Reference = "cached"
    device: Device = "cuda"
    grad_accum_dtype: str = "fp32"
    options: ZeroOptions = field(default_factory=ZeroOptions)

    @property
    def element(self) -> int:
        """Bytes of a parameter that is computed with."""
        return FLOAT if self.zero_stage == 0 else ELEMENT[self.precision]

    @property
    def shards(self) -> int:
        """Among how many ranks the optimizer's states are divided."""
        return self.ranks if self.zero_stage > 0 else 1


@dataclass(frozen=True)
class Memory:
    """The bytes of one rank at its highest moment, by part, and the CPU memory that offload takes for it.

    Args:
        most: with the holes that a CPU's heap may hold.
    """

    parts: dict[str, float]
    moment: str
    offloaded: float
    most: float

    @property
    def total(self) -> float:
        """The peak."""
        return sum(self.parts.values())


def memory_of(sizes: Sizes, way: Way) -> Memory:
    """Return what a rank takes at its highest moment."""
    moments = {**_forwards(sizes, way), **_backward(sizes, way), "update": _update(sizes, way)}
    moment = max(moments, key=lambda name: sum(moments[name].values()))
    always = _states(sizes, way)
    parts = {name: always.get(name, 0.0) + moments[moment].get(name, 0.0) for name in PARTS}
    # As much as the largest pass holds, as it was measured: freed pages go back to the system after each backward only.
    # To have each block go back at once would take up to a third more processor time.
    passing = max(beside.get("activations", 0.0) + beside.get("logits", 0.0) for beside in moments.values())
    holes = passing if way.device == "cpu" else 0.0
    return Memory(parts, moment, _offloaded(sizes, way), sum(parts.values()) + holes)


# ---- what is there all the time --------------------------------------------------------------------------------------


def _states(sizes: Sizes, way: Way) -> dict[str, float]:
    is_copied = way.zero_stage > 0  # into float32, whatever the parameters are
    optimizer = (MOMENTS + FLOAT * is_copied) * sizes.num_trained / way.shards
    return {
        "weights": _weights(sizes, way),
        "optimizer": 0.0 if way.options.adam_offload else optimizer,
        "reference": 0.0 if way.options.ref_offload else _reference(sizes, way),
        "libraries": ON_GPU if way.device == "cuda" else ON_CPU,
    }


def _weights(sizes: Sizes, way: Way) -> float:
    whole = way.element * (sizes.numel - sizes.in_4_bits) + IN_4_BITS * sizes.in_4_bits
    if way.zero_stage < 3:
        return whole
    if way.options.param_offload:
        return 0.0
    return whole / way.ranks + (whole / way.options.zpg if way.options.zpg > 1 else 0.0)


def _reference(sizes: Sizes, way: Way) -> float:
    if way.reference != "model":
        return 0.0
    return way.element * sizes.reference / (way.ranks if way.zero_stage == 3 else 1)


# ---- the moments -----------------------------------------------------------------------------------------------


def _forwards(sizes: Sizes, way: Way) -> dict[str, dict[str, float]]:
    """Return what there is beside, while no gradient is asked for."""
    kept = FLOAT * sizes.num_trained / way.ranks if way.zero_stage == 3 and not way.options.adam_offload else 0.0
    found, beside = sizes.forward, {"gradients": kept, "buffers": _gathered(sizes, way)}
    return {
        "layers without gradient": beside | {"activations": found.kept + found.layers},
        "head without gradient": beside | {"activations": found.kept, "logits": found.head},
    }


def _backward(sizes: Sizes, way: Way) -> dict[str, dict[str, float]]:
    """Return what there is beside, in the backward of the largest micro-batch but the first of a step."""
    found, gathered = sizes.training[way.recomputation], _gathered(sizes, way)
    gradients, bucket = _gradients(sizes, way)
    # A processor's memory is taken page by page, as the bucket fills; stage 3 keeps its own from the first step on.
    empty = 0.0 if way.device == "cpu" and way.zero_stage < 3 else bucket
    early = {"gradients": gradients, "buffers": gathered + empty}
    late = {"gradients": gradients, "buffers": gathered + bucket}
    return {
        "backward of the head": early | {"activations": found.kept, "logits": found.head},
        "backward of the layers": early | {"activations": found.kept + found.layers},
        "backward of the embeddings": late | {"activations": found.end},
    }


def _gathered(sizes: Sizes, way: Way) -> float:
    """Return the parameters that are gathered at stage 3."""
    return float(way.element * min(LIVE, sizes.numel)) if way.zero_stage == 3 else 0.0


def _bucket(sizes: Sizes, way: Way) -> int:
    section = add_sizes(zero_section(way.zero_stage, way.options), sizes.trained, sizes.frozen)
    return int(section["reduce_bucket_size"])


def _gradients(sizes: Sizes, way: Way) -> tuple[float, float]:
    """Return the bytes of gradients, and of the buffers in which they travel."""
    trained, e = sizes.num_trained, way.element
    if way.zero_stage == 0:
        return FLOAT * trained, 0.0
    summed = ELEMENT[way.grad_accum_dtype]
    # In the bucket, and in float32 on its way.
    buffers = float((e + (FLOAT if e != FLOAT else 0)) * _bucket(sizes, way))
    if way.zero_stage == 1:
        return (e + (summed if e != summed else 0)) * trained, buffers
    return 0.0 if way.options.adam_offload else summed * trained / way.ranks, buffers


def _update(sizes: Sizes, way: Way) -> dict[str, float]:
    trained = sizes.num_trained
    if way.options.adam_offload:
        return {}
    gradients, _ = _gradients(sizes, way)
    # All gradients are copied into one tensor, to be reduced; at stages 1 and 2 for the optimizer.
    flat = FLOAT * (
        min(trained, ALL_REDUCE) if way.zero_stage == 0 else trained / way.ranks if way.zero_stage < 3 else 0
    )
    # torch's AdamW makes a square root and a quotient of each tensor's size; the fused one of a GPU makes none.
    largest = max(sizes.trained) if way.zero_stage == 0 else trained / way.ranks
    passing = 2 * FLOAT * largest if way.device == "cpu" else 0.0
    return {"gradients": gradients, "buffers": flat + passing}


def _offloaded(sizes: Sizes, way: Way) -> float:
    options, trained = way.options, sizes.num_trained
    is_in_memory = options.adam_offload and options.offload_nvme_path is None
    states = (FLOAT + MOMENTS + FLOAT) * trained / way.shards if is_in_memory else 0.0
    weights = way.element * sizes.numel / way.ranks if options.param_offload else 0.0
    return states + weights + (_reference(sizes, way) if options.ref_offload else 0.0)
