"""Prints the table of docs/memory.md: `python docs/make_memory_table.py`; a test holds the page to it.

Bytes a parameter as DeepSpeed 0.19.8 was seen to allocate them in bf16 with float32 accumulation, divided over ranks by
the ZeRO stage; activations by the formula of Korthikanti et al., arXiv:2205.05198v1, section 4.1, for flash attention.
"""

from dataclasses import dataclass

GB = 1e9
CARD = 80.0  # GB
# The CUDA context, NCCL, and what the allocator cannot hand out.
RESERVED = 4.0
WEIGHT, GRADIENT, ACCUMULATED, MASTER_AND_MOMENTS = 2, 2, 4, 12
REDUCE_BUCKET, PREFETCH, LIVE = 5e7, 5e7, 1e9  # elements; see openkto/distributed/zero_options.py and DeepSpeed


@dataclass(frozen=True)
class Shape:
    """A Llama-like model."""

    name: str
    layers: int
    hidden: int
    inner: int
    kv: int  # width of keys, and of values
    vocabulary: int
    tied: bool = False

    @property
    def layer(self) -> int:
        return 2 * self.hidden * self.hidden + 2 * self.hidden * self.kv + 3 * self.hidden * self.inner

    @property
    def numel(self) -> int:
        return self.layers * self.layer + self.vocabulary * self.hidden * (1 if self.tied else 2)


SHAPES = (
    Shape("1B", 16, 2048, 8192, 512, 128256, tied=True),
    Shape("8B", 32, 4096, 14336, 1024, 128256),
    Shape("14B", 40, 5120, 17408, 1024, 151936),
    Shape("70B", 80, 8192, 28672, 1024, 128256),
)
GPUS = (1, 8, 16, 64)
RECOMPUTATION = ("none", "selective", "whole")


def states(shape: Shape, stage: int, ranks: int, *, adam_offload: bool = False, param_offload: bool = False) -> float:
    """Return the GB of weights, gradients and optimizer states on a GPU, and of DeepSpeed's buffers, while training."""
    n = shape.numel
    weights = WEIGHT * n / (ranks if stage == 3 else 1)
    if param_offload:
        weights = 0.0
    gradients = (GRADIENT + ACCUMULATED) * n if stage == 1 else ACCUMULATED * n / ranks
    optimizer = MASTER_AND_MOMENTS * n / ranks
    if adam_offload:
        optimizer = 0.0
        gradients = 0.0 if stage > 1 else gradients
    # In the buffer, and in float32 on its way.
    buffers = (GRADIENT + ACCUMULATED) * REDUCE_BUCKET
    if stage == 3:
        buffers += WEIGHT * (min(LIVE, n) if ranks > 1 or param_offload else 0) + WEIGHT * PREFETCH
        # The largest parameter is gathered, and its gradient made, whole.
        buffers += (WEIGHT + GRADIENT + ACCUMULATED) * shape.vocabulary * shape.hidden
    return (weights + gradients + optimizer + buffers) / GB


def lora(shape: Shape, stage: int, ranks: int) -> float:
    """Return the GB of a frozen model with an adapter of rank 16 on every linear layer."""
    widths = 4 * shape.hidden + 2 * (shape.hidden + shape.kv) + 3 * (shape.hidden + shape.inner)
    adapter = 16 * widths * shape.layers
    weights = WEIGHT * shape.numel / (ranks if stage == 3 else 1)
    buffers = WEIGHT * (min(LIVE, shape.numel) if stage == 3 and ranks > 1 else 0)
    return (weights + adapter * (WEIGHT + GRADIENT + ACCUMULATED + MASTER_AND_MOMENTS) + buffers) / GB


def activations(shape: Shape, tokens: int, how: str) -> float:
    """Return the GB that a micro-batch of this many tokens keeps: none, selective or whole recomputation."""
    h, f, kv = shape.hidden, shape.inner, shape.kv
    # In bf16: the residual twice, two norms' results, q, k, v (before and after rotation), attention's result, gate,
    # up, its SiLU and the product, and what the two blocks add.
    none = 2 * (2 * h + 2 * h + 2 * h + 3 * kv + h + 4 * f + 2 * h)
    # The results of the seven products and of attention, and the layer's input.
    selective = 2 * (h + h + 2 * kv + h + h + 2 * f + h)
    whole = 2 * h
    layer = {"none": none, "selective": selective, "whole": whole}[how]
    running = 0 if how == "none" else none  # of the layer that runs again
    return (shape.layers * layer + running) * tokens / GB


def full_training(shape: Shape, ranks: int, tokens: int) -> str:
    """Return the first way to train all parameters that fits, from the fastest on; the reference is cached."""
    ways = (
        [(how, stage, False, False) for how in RECOMPUTATION for stage in (1, 2, 3)]
        + [(how, stage, True, False) for stage in (2, 3) for how in RECOMPUTATION]
        + [(how, 3, True, True) for how in RECOMPUTATION]
    )
    for how, stage, adam, params in ways:
        if ranks == 1 and stage > 1 and not adam:
            continue  # nothing to share with
        held = states(shape, stage, ranks, adam_offload=adam, param_offload=params)
        total = held + activations(shape, tokens, how)
        if total + RESERVED <= CARD:
            flags = [f"stage {stage}"] + ["adam_offload"] * adam + ["param_offload"] * params
            flags += [] if how == "none" else [f"checkpointing {how}"]
            return f"{' + '.join(flags)}: {total:.0f} GB"
    return "no"


def lora_training(shape: Shape, ranks: int, tokens: int) -> str:
    """Return likewise the first way to train an adapter."""
    for how in RECOMPUTATION:
        for stage in (1, 3):
            total = lora(shape, stage, ranks) + activations(shape, tokens, how)
            if total + RESERVED <= CARD and not (stage == 3 and ranks == 1):
                return f"stage {stage}{'' if how == 'none' else f' + checkpointing {how}'}: {total:.0f} GB"
    return "no"


def page(tokens: int = 8192) -> str:
    """Return the tables for micro-batches of these many tokens."""
    lines = []
    for title, choose in (("All parameters", full_training), ("LoRA, rank 16", lora_training)):
        lines += [f"| {title} | {' | '.join(f'{n} GPU' + 's' * (n > 1) for n in GPUS)} |", "| --- " * 5 + "|"]
        lines += [f"| {s.name} | {' | '.join(choose(s, n, tokens) for n in GPUS)} |" for s in SHAPES]
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    print(page())
