"""Prints the tables of docs/memory.md: `python docs/make_memory_table.py`; a test holds the page to them.

They are plans (docs/plan.md) of Llama-like models: the same count of activations, model of memory and choice of
settings.
"""

import functools
import sys
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from openkto.batches.loader import WITHOUT_GRADIENT
from openkto.config import LoraConfig
from openkto.distributed.zero_options import ZeroOptions
from openkto.models import Actor
from openkto.planning.activations import RECOMPUTATION, Activations, Recomputation
from openkto.planning.activations import Shape as MicroBatch
from openkto.planning.memory import Sizes, Way, memory_of
from openkto.planning.ways import RARE, Trains, best, choices, count_sizes, layout_of

GB = 1e9
CARD = 80.0  # GB
HEAD = 128  # elements
LORA_RANK = 16
NOTHING = Activations(0, 0, 0, 0)


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


@functools.cache
def sizes(shape: Shape, tokens: int, trains: Trains, recomputation: tuple[Recomputation, ...] = RECOMPUTATION) -> Sizes:
    """Return what takes memory of a model in bf16, with micro-batches of so many tokens, all of them scored."""
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.hidden // HEAD,
        num_key_value_heads=shape.kv // HEAD,
        tie_word_embeddings=shape.tied,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        actor = Actor(model, lora=LoraConfig(lora_rank=LORA_RANK if trains == "LoRA" else 0))
    without = tokens * WITHOUT_GRADIENT["cuda"]
    micro_batches = MicroBatch(1, tokens, tokens - 1), MicroBatch(1, without, without - 1)
    return count_sizes(actor, micro_batches, "cuda", reference=shape.numel, recomputation=recomputation)


def states(shape: Shape, way: Way, trains: Trains, tokens: int, *, in_4_bits: bool = False) -> float:
    """Return the GB of a GPU without activations and what is reserved; with all linear layers in 4 bits, if asked."""
    known = sizes(shape, tokens, trains, (way.recomputation,))
    idle = replace(
        known,
        training=dict.fromkeys(known.training, NOTHING),
        forward=NOTHING,
        in_4_bits=shape.layers * shape.layer if in_4_bits else 0,
    )
    memory = memory_of(idle, way)
    return (memory.total - memory.parts["libraries"]) / GB


def cell(shape: Shape, ranks: int, tokens: int, trains: Trains) -> str:
    """Return the first choice that fits a card; the reference is cached, or the policy without its adapter."""
    base = Way(zero_stage=0, ranks=ranks, options=ZeroOptions())
    reference = {"full": ("cached",), "LoRA": ("adapter",)}
    found = choices({trains: sizes(shape, tokens, trains)}, base, reference, lambda way: layout_of(way) not in RARE)
    choice = best(found, CARD * GB)
    if choice is None:
        return "no"
    way = choice.way
    words = [f"stage {way.zero_stage}"]
    words += ["adam_offload"] * way.options.adam_offload + ["param_offload"] * way.options.param_offload
    words += [] if way.recomputation == "none" else [f"checkpointing {way.recomputation}"]
    return f"{' + '.join(words)}: {choice.memory.total / GB:.0f} GB"


def page(tokens: int = 8192) -> str:
    """Return the tables for micro-batches of so many tokens."""
    lines = []
    titles: dict[str, Trains] = {"All parameters": "full", f"LoRA, rank {LORA_RANK}": "LoRA"}
    for title, trains in titles.items():
        lines += [f"| {title} | {' | '.join(f'{n} GPU' + 's' * (n > 1) for n in GPUS)} |", "| --- " * 5 + "|"]
        lines += [f"| {s.name} | {' | '.join(cell(s, n, tokens, trains) for n in GPUS)} |" for s in SHAPES]
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    print(page())
