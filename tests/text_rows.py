"""A tiny model folder with a byte-level tokenizer, and files of labelled text rows, for tests of whole commands."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.tiny import tiny_llama

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of one token a byte, with <pad>, <s> and </s>, which adds none of them by itself."""
    words = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    core = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def write_model(folder: Path, **changes: Any) -> Path:
    """Save a tiny Llama and its tokenizer."""
    tokenizer = byte_tokenizer()
    tiny_llama(vocab_size=len(tokenizer), max_position_embeddings=256, **changes).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_rows(path: Path, count: int, messages: bool = False) -> Path:
    """Save rows with distinct prompts and completions, about two thirds desirable."""
    rows = []
    for i in range(count):
        prompt: Any = f"Is {i} even?"
        completion: Any = f" {'Yes' if i % 2 == 0 else 'No, ' + str(i) + ' is odd'}."
        if messages:
            prompt = [{"role": "user", "content": prompt}]
            completion = [{"role": "assistant", "content": completion.strip()}]
        rows.append({"prompt": prompt, "completion": completion, "label": i % 3 != 0})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
