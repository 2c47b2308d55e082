"""Signs of a chat: in a plain text that no template has written, and in a model that came without its template."""

import re
from pathlib import Path
from typing import Any

from openkto.data.messages import Message
from openkto.data.notes import Note

# How transcripts and other models' templates mark whose turn it is, at the start of a line or as a token.
TRANSCRIPT = re.compile(r"(?im)^\s*(?:#+\s*)?(?:user|human|assistant|instruction|response|q|a)\s*:")
MARKUP = re.compile(r"<\|im_start\|>|<\|start_header_id\|>|\[INST\]|<start_of_turn>|<\|(?:user|assistant|system)\|>")
NEXT_SPEAKER = re.compile(r"(?i)(?:^|\n)\W*(?:assistant|ai|bot|gpt)\W*:\W*$")
SPEAKER = re.compile(r"(?i)\s*\W{0,3}(?:user|human|assistant|ai|bot|gpt)\W{0,3}?:")
# Of an answer that was cut from another model's text; </s> is also HTML's.
END_MARKUP = re.compile(
    r"<\|(?:im_end|im_start|eot_id|end_of_text|endoftext|end)\|>|<end_of_turn>|\[/INST\]|</s>(?=\s*$)"
)
LEAST_TURNS = 2  # lines that begin so
# How the makers of chat models mark them in their names.
CHAT_NAME = re.compile(r"(?i)(?:^|[-_.])(?:chat|instruct|it|sft|dpo)(?:$|[-_.])")


def signs_in(prompt: str | list[Message]) -> tuple[Note, ...]:
    """Return what a prompt's text shows of a chat that no template has written; a plain one goes through none."""
    texts = [prompt] if isinstance(prompt, str) else [str(message["content"]) for message in prompt]
    has_markup = any(MARKUP.search(text) for text in texts)
    if isinstance(prompt, str) and (has_markup or len(TRANSCRIPT.findall(prompt)) >= LEAST_TURNS):
        return ("looks like a chat",)
    return ("foreign markup",) if has_markup else ()


def signs_of_transcript(prompt: str, completion: object) -> tuple[Note, ...]:
    """Return what a text prompt that becomes a message, and its answer, show of a transcript they were cut from."""
    notes: tuple[Note, ...] = ("asks as a transcript",) if NEXT_SPEAKER.search(prompt) else ()
    has_mark = isinstance(completion, str) and SPEAKER.match(completion)
    return (*notes, "answers as a transcript") if has_mark else notes


def seems_to_chat(tokenizer: Any) -> bool:
    """Return whether a tokenizer seems to be a chat model's: it has a token for a turn, or is called so."""
    added = " ".join(token.content for token in tokenizer.added_tokens_decoder.values())
    return MARKUP.search(added) is not None or CHAT_NAME.search(Path(tokenizer.name_or_path).name) is not None
