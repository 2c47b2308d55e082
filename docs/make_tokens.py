"""Prints the worked examples of docs/tokens.md: `python docs/make_tokens.py`; a test holds the page to it.

The tokenizer is built here, so that its ids are few and its tokens are words: what it is given decides its vocabulary.
Everything after that is what `openkto train` does with the same rows.
"""

import os
import tempfile
from itertools import groupby

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from openkto.data.dataset import UnpairedPreferenceDataset
from openkto.data.row import RowSettings

SPECIAL = ["<|start|>", "<|end|>", "<think>", "</think>", "<unk>"]
TEMPLATE = (
    "{% if tools %}<|start|>tools\n{% for t in tools %}{{ t.function.name }}{% endfor %}<|end|>\n{% endif %}"
    "{% for m in messages %}<|start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}<|end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
QUESTION = [{"role": "user", "content": "Is water wet?"}]
CALL = {"type": "function", "function": {"name": "look_up", "arguments": {"word": "wet"}}}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {}}}


def answer(content: str, **more: object) -> dict[str, object]:
    return {"role": "assistant", "content": content, **more}


ROWS = {
    "A question and its answer": {"prompt": QUESTION, "completion": [answer("Yes.")], "label": True},
    "An answer with thoughts": {
        "prompt": QUESTION,
        "completion": [answer("No.", reasoning_content="It flows.")],
        "label": False,
    },
    "A tool call, its result and the answer": {
        "prompt": QUESTION,
        "completion": [answer("", tool_calls=[CALL]), {"role": "tool", "content": "It flows."}, answer("Yes.")],
        "tools": [TOOL],
        "label": True,
    },
}
TEXT_ROW = {"prompt": "Is water wet? Answer: ", "completion": "Yes.", "label": True}


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose tokens are words with the space before them, signs and newlines."""
    words = pre_tokenizers.Split(Regex(r" ?[A-Za-z_]+| |\n|[^A-Za-z_\s]"), "isolated")
    texts = [
        "Is water wet? Answer: Yes. No. It flows.",
        "Yes\nNo\nIt\nuser\nassistant\ntool\ntools",
        'look_up{"word": "wet"} ',
    ]
    seen = dict.fromkeys(word for text in texts for word, _ in words.pre_tokenize_str(text))
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*SPECIAL, *seen])}, unk_token="<unk>"))
    core.pre_tokenizer, core.decoder = words, decoders.Fuse()
    core.add_special_tokens(SPECIAL[:2])
    core.add_tokens(SPECIAL[2:4])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|end|>", pad_token="<|end|>", unk_token="<unk>", chat_template=TEMPLATE
    )


def parts(row: dict, tokenizer: PreTrainedTokenizerFast) -> str:
    """Return a row's tokens with their ids, a line for each part of it."""
    completion = zip(row["completion_mask"], row["completion_ids"], strict=True)
    scored = [("scored" if mask else "context", id_) for mask, id_ in completion]
    marked = [("prompt", id_) for id_ in row["prompt_ids"]] + scored
    lines = []
    for part, run in groupby(marked, key=lambda pair: pair[0]):
        shown = [f"{tokenizer.decode([id_])!r} {id_}" for _, id_ in run]
        lines.append(f"{part:8}" + "  ".join(shown))
    return "\n".join(lines)


def as_one_text(row: dict[str, str], tokenizer: PreTrainedTokenizerFast) -> str:
    """Return a line of the tokens that prompt and completion have when they are tokenised together."""
    ids = tokenizer(row["prompt"] + row["completion"])["input_ids"]
    return "whole   " + "  ".join(f"{tokenizer.decode([id_])!r} {id_}" for id_ in ids)


def page() -> str:
    """Return the examples as Markdown."""
    tokenizer = word_tokenizer()
    plain = RowSettings(apply_chat_template=False)
    with tempfile.TemporaryDirectory() as folder:
        chats = UnpairedPreferenceDataset(list(ROWS.values()), tokenizer, cache_dir=folder)
        texts = UnpairedPreferenceDataset([TEXT_ROW], tokenizer, cache_dir=folder, row_settings=plain)
        shown = [(title, parts(chats[i], tokenizer)) for i, title in enumerate(ROWS)]
        text = f"{parts(texts[0], tokenizer)}\n\n{as_one_text(TEXT_ROW, tokenizer)}"
    shown.append(("A text whose last space joins the answer", text))
    return "\n".join(f"### {title}\n\n```text\n{lines}\n```\n" for title, lines in shown)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(page())
