"""Prints the table of docs/recipes.md, and with --headers each recipe's line of memory; a test holds both to this.

What a GPU holds is what `openkto plan` says, as in docs/make_memory_table.py. The models' sizes are those of their
config.json on the Hub, Llama's and Qwen3's compared with meta-llama/llama-models (models/sku_list.py) and
pytorch/torchtune (torchtune/models/qwen3).
"""

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from make_memory_table import GB, SHAPES, Shape, sizes, states

from openkto.distributed.zero_options import ZeroOptions
from openkto.planning.activations import Recomputation
from openkto.planning.memory import FLOAT, MOMENTS, ON_GPU, Way
from openkto.planning.ways import Trains

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
NAME = re.compile(r"(\d+b)_(full|lora|qlora)_(\d+)x(\d+)gb")
OF_TABLE = {shape.name: shape for shape in SHAPES}
MODELS = {
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": Shape("1.7B", 24, 2048, 8192, 2048, 49152, tied=True),
    "meta-llama/Llama-3.2-1B-Instruct": OF_TABLE["1B"],
    "meta-llama/Llama-3.2-3B-Instruct": Shape("3B", 28, 3072, 8192, 1024, 128256, tied=True),
    "meta-llama/Llama-3.1-8B-Instruct": OF_TABLE["8B"],
    "Qwen/Qwen3-8B": Shape("8B", 36, 4096, 12288, 1024, 151936),
    "Qwen/Qwen3-14B": OF_TABLE["14B"],
    "Qwen/Qwen2.5-32B-Instruct": Shape("32B", 64, 5120, 27648, 1024, 152064),
    "meta-llama/Llama-3.3-70B-Instruct": OF_TABLE["70B"],
}
# The CUDA context and the allocator's waste on a single GPU; ON_GPU has NCCL in it.
RESERVED_ON_ONE = 1.5
WAYS = {"full": "all parameters", "lora": "LoRA", "qlora": "QLoRA"}


@dataclass(frozen=True)
class Recipe:
    """A file of configs/ for a model on this many cards.

    Args:
        card: GB of each GPU.
    """

    name: str
    size: int  # as named: billions of parameters
    way: str
    gpus: int
    card: float
    settings: dict[str, Any]

    @property
    def shape(self) -> Shape:
        return MODELS[self.settings["pretrain"]]

    @property
    def trains(self) -> Trains:
        return "full" if self.way == "full" else "LoRA"

    @property
    def how(self) -> Recomputation:
        kinds: dict[Any, Recomputation] = {True: "whole", "selective": "selective", False: "none"}
        return kinds[self.settings["gradient_checkpointing"]]

    @property
    def states(self) -> float:
        """GB of weights, gradients, optimizer states and DeepSpeed's buffers on a GPU."""
        options = ZeroOptions(adam_offload=self.settings.get("adam_offload", False))
        way = Way(self.settings["zero_stage"], self.gpus, recomputation=self.how, options=options)
        return states(self.shape, way, self.trains, self.settings["max_len"], in_4_bits=self.way == "qlora")

    @property
    def row(self) -> float:
        """GB that one row of max_len tokens takes in its forward and backward."""
        return sizes(self.shape, self.settings["max_len"], self.trains, (self.how,)).training[self.how].peak / GB

    @property
    def reserved(self) -> float:
        return ON_GPU / GB if self.gpus > 1 else RESERVED_ON_ONE

    @property
    def node(self) -> float:
        """GB of CPU memory that a node of up to 8 GPUs needs for what is offloaded."""
        if not self.settings.get("adam_offload", False):
            return 0.0
        # The gradients beside the optimizer's states, in float32.
        return (FLOAT + MOMENTS + FLOAT) * self.shape.numel * min(self.gpus, 8) / self.gpus / GB

    @property
    def memory(self) -> str:
        """The recipe's own sentence."""
        offloaded = f" CPU memory of a node: {self.node:.0f} GB." if self.node else ""
        return (
            f"# Memory per GPU: {self.states:.1f} GB, and {self.row:.1f} GB for a row of {self.settings['max_len']} "
            f"tokens.{offloaded}"
        )


def recipes() -> list[Recipe]:
    """Return the recipes by model, way and card."""
    found = []
    for path in CONFIGS.glob("*.yaml"):
        if parts := NAME.fullmatch(path.stem):
            settings = yaml.safe_load(path.read_text(encoding="utf-8"))
            size = int(parts[1].rstrip("b"))
            found.append(Recipe(path.name, size, parts[2], int(parts[3]), float(parts[4]), settings))
    return sorted(found, key=lambda recipe: (recipe.size, list(WAYS).index(recipe.way), recipe.gpus, recipe.card))


def page() -> str:
    """Return the table."""
    lines = ["| file | model | trained | GPUs | GB per GPU | a row, GB | CPU memory, GB |", "| --- " * 7 + "|"]
    for recipe in recipes():
        node = f"{recipe.node:.0f}" if recipe.node else ""
        cells = (
            f"[{recipe.name}](../configs/{recipe.name})", recipe.settings["pretrain"], WAYS[recipe.way],
            f"{recipe.gpus} of {recipe.card:.0f} GB", f"{recipe.states:.1f}", f"{recipe.row:.1f}", node,
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print("\n".join(f"{recipe.name}\n{recipe.memory}" for recipe in recipes()) if "--headers" in sys.argv else page())
