"""What the benchmarks run on: a random-weight Llama, its tokenizer, and rows whose lengths are those of real ones."""

import argparse
import json
import os
import random
import string
from collections.abc import Callable
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from benchmarks.clocks import CLOCKS
from openkto.data.dataset import UnpairedPreferenceDataset
from tests.text_rows import TEMPLATE

# (percent of the rows, characters at most), of prompts with all their turns and of completions: 200 English rows of a
# public preference set. Between two of them the logarithm of the length is linear.
PROMPT_LENGTHS = ((0, 32), (10, 72), (25, 148), (50, 524), (75, 2138), (90, 4185), (100, 13353))
COMPLETION_LENGTHS = ((0, 2), (10, 118), (25, 441), (50, 1054), (75, 2053), (90, 2660), (100, 5179))
WORDS, LONGEST_WORD = 3000, 7

# 32M parameters with a vocabulary of 8,192; the head is its own.
SMALL = {
    "vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 7,
    "num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip


def draw_rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return rows of made-up words, half of them desirable, as long as real ones."""
    rng = random.Random(seed)
    words = made_up_words(rng)

    def text(lengths: tuple[tuple[int, int], ...]) -> str:
        characters = draw_length(lengths, rng.random() * 100)
        return words(characters // 2 + 1)[:characters].strip() or "a"

    return [as_row(text(PROMPT_LENGTHS), text(COMPLETION_LENGTHS), is_desirable=i % 2 == 0) for i in range(count)]


def draw_shares(
    count: int, tokens: int, share: float, answers: int = 1, spread: float = 0.0, seed: int = 0
) -> list[dict[str, Any]]:
    """Return rows of made-up words, half of them desirable, of whose tokens prompts have about this share.

    Args:
        tokens: of a row, about, where `train_tokenizer` has seen the rows: a word is then one.
        answers: how many rows, one after the other, have a prompt in common.
        spread: standard deviation of the logarithm of a prompt's length, and of a completion's; 0 draws each between
            half and one and a half of the mean.
    """
    rng = random.Random(seed)
    words = made_up_words(rng)

    def text(mean: float) -> str:
        factor = rng.lognormvariate(-(spread**2) / 2, spread) if spread else rng.uniform(0.5, 1.5)
        return words(max(1, round(mean * factor)))

    prompts = [text(share * tokens) for _ in range(-(-count // answers))]
    return [as_row(prompts[i // answers], text((1 - share) * tokens), is_desirable=i % 2 == 0) for i in range(count)]


def made_up_words(rng: random.Random) -> Callable[[int], str]:
    """Return a function that draws a text of so many words, which come as often as those of a language."""
    words = ["".join(rng.choices(string.ascii_lowercase, k=rng.randint(1, LONGEST_WORD))) for _ in range(WORDS)]
    cumulative = list(accumulate(1 / rank for rank in range(1, WORDS + 1)))
    return lambda count: " ".join(rng.choices(words, cum_weights=cumulative, k=count))


def as_row(prompt: str, completion: str, *, is_desirable: bool) -> dict[str, Any]:
    """Return a row of one question and one answer."""
    return {
        "prompt": [{"role": "user", "content": prompt}],
        "completion": [{"role": "assistant", "content": completion}],
        "label": is_desirable,
    }


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
        special_tokens=["<pad>", "<s>", "</s>", "<|user|>", "<|assistant|>"],  # those of the template among them
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator((m["content"] for row in rows for m in row["prompt"] + row["completion"]), trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def read_tokens(folder: Path, rows: list[dict[str, Any]], vocabulary: int, max_len: int) -> UnpairedPreferenceDataset:
    """Return rows as training reads them, with a tokenizer trained on them; what is written goes into the folder."""
    file, tokenizer = write_rows(folder / "rows.jsonl", rows), train_tokenizer(rows, vocabulary)
    return UnpairedPreferenceDataset(file, tokenizer, max_len, cache_dir=folder / "cache")


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


def add_arguments(
    parser: argparse.ArgumentParser,
    *,
    batch: int,
    steps: int,
    max_len: int,
    steps_are: str = "steps measured, after one to warm up",
) -> None:
    """Add what the measurements of a whole run take, with these defaults."""
    parser.add_argument("--rows", type=Path, help="JSON lines with prompt, completion (messages) and label; else drawn")
    parser.add_argument("--batch", type=int, default=batch, help="rows in a global batch (%(default)s)")
    parser.add_argument("--steps", type=int, default=steps, help=f"{steps_are} (%(default)s)")
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


def prepare(folder: Path, rows: list[dict[str, Any]], shape: dict[str, Any]) -> tuple[Path, Path]:
    """Write rows and a model for them; return both paths."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(rows, shape["vocab_size"])
    return write_rows(folder / "rows.jsonl", rows), write_model(folder / "model", shape, tokenizer)
