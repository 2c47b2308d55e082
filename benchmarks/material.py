"""What the benchmarks run on: a random-weight Llama, its tokenizer, and rows whose lengths are those of real ones."""

import argparse
import json
import os
import random
import string
import time
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.text_rows import TEMPLATE

# (percent of the rows, characters at most), of prompts with all their turns and of completions: 200 English rows of a
# public preference set. Between two of them the logarithm of the length is linear.
PROMPT_LENGTHS = ((0, 32), (10, 72), (25, 148), (50, 524), (75, 2138), (90, 4185), (100, 13353))
COMPLETION_LENGTHS = ((0, 2), (10, 118), (25, 441), (50, 1054), (75, 2053), (90, 2660), (100, 5179))
WORDS, LONGEST_WORD = 3000, 7

CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}

# 32M parameters with a vocabulary of 8,192; the head is its own.
SMALL = {
    "vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 7,
    "num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip


def draw_rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return rows of made-up words, half of them desirable, as long as real ones."""
    rng = random.Random(seed)
    words = ["".join(rng.choices(string.ascii_lowercase, k=rng.randint(1, LONGEST_WORD))) for _ in range(WORDS)]
    cumulative = list(accumulate(1 / rank for rank in range(1, WORDS + 1)))  # as often as words of a language

    def text(lengths: tuple[tuple[int, int], ...]) -> str:
        characters = draw_length(lengths, rng.random() * 100)
        drawn = " ".join(rng.choices(words, cum_weights=cumulative, k=characters // 2 + 1))
        return drawn[:characters].strip() or "a"

    def message(role: str, content: str) -> list[dict[str, str]]:
        return [{"role": role, "content": content}]

    return [
        {
            "prompt": message("user", text(PROMPT_LENGTHS)),
            "completion": message("assistant", text(COMPLETION_LENGTHS)),
            "label": i % 2 == 0,
        }
        for i in range(count)
    ]


def draw_length(lengths: tuple[tuple[int, int], ...], percent: float) -> int:
    """Return the length that this share of the rows does not pass."""
    for (low, shortest), (high, longest) in pairwise(lengths):
        if percent <= high:
            return round(shortest * (longest / shortest) ** ((percent - low) / (high - low)))
    return lengths[-1][1]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Save rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def train_tokenizer(rows: list[dict[str, Any]], vocabulary: int) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer with a chat template, trained on the rows' texts."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator((m["content"] for row in rows for m in row["prompt"] + row["completion"]), trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def write_model(folder: Path, shape: dict[str, Any], tokenizer: Any, dtype: torch.dtype = torch.float32) -> Path:
    """Save a random-weight Llama of this shape with its tokenizer."""
    torch.manual_seed(0)
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, **special))
    finally:
        torch.set_default_dtype(before)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def add_arguments(parser: argparse.ArgumentParser, *, batch: int, steps: int, max_len: int) -> None:
    """Add what the measurements of a whole run take, with these defaults."""
    parser.add_argument("--rows", type=Path, help="JSON lines with prompt, completion (messages) and label; else drawn")
    parser.add_argument("--batch", type=int, default=batch, help="rows in a global batch (%(default)s)")
    parser.add_argument("--steps", type=int, default=steps, help="steps measured, after one to warm up (%(default)s)")
    parser.add_argument("--max_len", type=int, default=max_len, help="tokens a row (%(default)s)")
    parser.add_argument(
        "--threads", type=int, default=len(os.sched_getaffinity(0)), help="threads of each process (%(default)s)"
    )
    parser.add_argument(
        "--clock",
        choices=CLOCKS,
        default="wall",
        help="`processor` counts a process's own seconds: for a machine with other work on it, with --threads 1",
    )


def prepare(folder: Path, rows: Path | None, needed: int, shape: dict[str, Any]) -> tuple[Path, Path]:
    """Write the rows (those of a file, or `needed` drawn ones) and a model for them; return both paths."""
    folder.mkdir(parents=True, exist_ok=True)
    found = read_rows(rows) if rows is not None else draw_rows(needed)
    tokenizer = train_tokenizer(found, shape["vocab_size"])
    return write_rows(folder / "rows.jsonl", found), write_model(folder / "model", shape, tokenizer)
