"""One tokenizer's chat template: rendering with it, and what its markup is.

What the template writes around a message is found by rendering short conversations of known words.
"""

import datetime
import re
from bisect import bisect_left
from functools import cached_property
from typing import Any

from openkto.data.chat_signs import seems_to_chat
from openkto.data.messages import Message
from openkto.data.problems import BadRow, shorten
from openkto.process.limits import ROW_CHARACTERS, TooLargeError, memory_limit, time_limit

FIRST, SECOND, THIRD = "qz1zq", "qz2zq", "qz3zq"
ASKED: list[Message] = [{"role": "user", "content": FIRST}]
ANSWERED: list[Message] = [*ASKED, {"role": "assistant", "content": SECOND}]
ASKED_AGAIN: list[Message] = [*ANSWERED, {"role": "user", "content": THIRD}]
RULE_OF_SIZE = f"the chat template must render at most {ROW_CHARACTERS:,} characters, more than any model takes"
DIRECTIVES = "aAwdbBmyYHIpMSjUW"


class ChatTemplate:
    """Renders messages.

    Args:
        date: the day, YYYY-MM-DD, that a template which prints today's date is to print; None is today.
    """

    def __init__(self, tokenizer: Any, date: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._date = date
        self.exists = tokenizer.chat_template is not None
        self.is_missing = not self.exists and seems_to_chat(tokenizer)
        self._special = _pattern(special_tokens(tokenizer))

    @property
    def name(self) -> str:
        """What the template came with, for a sentence."""
        return self._tokenizer.name_or_path or "the tokenizer"

    def is_special(self, text: str) -> bool:
        """Return whether a text is one of the tokenizer's special tokens."""
        return self._special.fullmatch(text) is not None

    def source(self, tools: list[object] | None) -> str:
        """Return the template's text, with its date fixed; some models have one of their own for tools."""
        text = self._tokenizer.get_chat_template(tools=tools)
        return text if self._date is None else with_date(text, self._date)

    def render(
        self,
        place: str,
        messages: list[Message],
        tools: list[object] | None = None,
        kwargs: dict[str, object] | None = None,
        *,
        is_generating: bool = False,
        is_continued: bool = False,
    ) -> str:
        """Return the messages' text; raises BadRow where the template refuses them.

        Args:
            is_generating: end with what an answer follows.
            is_continued: leave the last message open, for a completion that continues it.
        """
        # Templates are programs of the model's author: on messages that they do not expect they raise anything.
        try:
            with time_limit(), memory_limit():
                text = self._tokenizer.apply_chat_template(
                    messages,
                    tools=tools,
                    chat_template=self.source(tools),
                    add_generation_prompt=is_generating,
                    continue_final_message=is_continued,
                    tokenize=False,
                    return_dict=False,
                    **(kwargs or {}),
                )
        except TooLargeError as error:
            raise BadRow(place, "too large", RULE_OF_SIZE, str(error)) from None
        except Exception as error:
            rule = "the messages must be ones that the tokenizer's chat template takes"
            raise BadRow(place, "chat template", rule, f"{type(error).__name__}: {shorten(str(error))}") from None
        assert isinstance(text, str), "apply_chat_template(tokenize=False) returns text"
        if len(text) > ROW_CHARACTERS:
            raise BadRow(place, "too large", RULE_OF_SIZE, f"{len(text):,}")
        return text

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """The tokens that the template itself ends an answer with."""
        try:
            last = self.render("", ANSWERED).partition(SECOND)[2]
            middle = self.render("", ASKED_AGAIN).partition(SECOND)[2].partition(THIRD)[0]
        except BadRow:
            return frozenset()
        shared = common_start(last, middle)
        begins = {self._tokenizer.bos_token, self._tokenizer.unk_token} - {self._tokenizer.eos_token}
        closing = [found for found in self._special.finditer(last) if found.group() not in begins]
        # Phi writes <|end|><|endoftext|> behind the last answer and <|end|> behind others: what both share ends a turn.
        found = [*closing[:1], *(found for found in closing if found.end() <= shared)]
        return frozenset({self._tokenizer.convert_tokens_to_ids(found[-1].group())} if found else ())

    def is_rendered(self, text: str) -> bool:
        """Return whether a text already holds the template's markup of a user's turn."""
        head, tail = self._markup
        if not head or head not in text:
            return False
        return self._special.search(head) is not None or (bool(tail) and text.rstrip().endswith(tail))

    @cached_property
    def _markup(self) -> tuple[str, str]:
        """What stands before a user's text, and what stands between it and an answer."""
        try:
            tail = self.render("", ASKED, is_generating=True).partition(FIRST)[2].strip()
            head = self.render("", ASKED_AGAIN).partition(SECOND)[2].partition(THIRD)[0]
        except BadRow:
            return "", ""
        for name in ("bos_token", "eos_token"):
            head = head.replace(getattr(self._tokenizer, name) or "\0", "")
        found = list(self._special.finditer(head))
        return (head[found[-1].start() :] if found else head).strip(), tail


def uses_date(tokenizer: Any) -> bool:
    """Return whether the tokenizer's chat template prints today's date."""
    return "strftime_now" in str(tokenizer.chat_template)


def with_date(template: str, date: str) -> str:
    """Return a template in which today is the given day, YYYY-MM-DD: a macro goes over the built-in function."""
    if "strftime_now" not in template:
        return template
    day = datetime.datetime.fromisoformat(date)
    replaced = "".join(f" | replace('%-{c}', '{day.strftime('%-' + c)}')" for c in "dmHIMSjy")
    replaced += "".join(f" | replace('%{c}', '{day.strftime('%' + c)}')" for c in DIRECTIVES)
    return f"{{% macro strftime_now(format) %}}{{{{ format{replaced} }}}}{{% endmacro %}}\n{template}"


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """Return the ids and texts of the special tokens."""
    special = {token_id: token.content for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    return special | dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))


def added_tokens(tokenizer: Any) -> dict[int, str]:
    """Return the ids and texts of all tokens whose text is never split, special or not."""
    added = {token_id: token.content for token_id, token in tokenizer.added_tokens_decoder.items()}
    return added | special_tokens(tokenizer)


def _pattern(tokens: dict[int, str]) -> re.Pattern[str]:
    """Return what finds any of the texts, the longest first; nothing where there are none."""
    texts = sorted({text for text in tokens.values() if text}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, texts)) or r"(?!)")


def common_start(first: str, second: str) -> int:
    """Return how many characters two texts have in common at their start."""
    shorter = min(len(first), len(second))
    return bisect_left(range(shorter), True, key=lambda i: first[: i + 1] != second[: i + 1])


def common_end(first: str, second: str) -> int:
    """Return how many characters two texts have in common at their end."""
    shorter = min(len(first), len(second))
    return bisect_left(range(shorter), True, key=lambda i: first[-i - 1 :] != second[-i - 1 :])
