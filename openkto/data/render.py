"""Render a row to text: what the model is given, and that with the answer behind it.

Messages go through the tokenizer's own chat template, so the prompt's text is the one that generation starts from.
"""

import re
from dataclasses import dataclass
from typing import Any

from openkto.data.guard import check_rendered
from openkto.data.messages import Message, with_arguments
from openkto.data.notes import Note
from openkto.data.problems import OR_SKIP, BadRow, data_error, shorten
from openkto.data.row import Row
from openkto.data.template import ChatTemplate, added_tokens, common_end, common_start

EMPTY_THOUGHTS = re.compile(r"\s*(?:<think>)?\s*</think>")
CLOSED_BLOCK = re.compile(r"\s*<(?!/)[^<>]+>[^<>]*<(?:/[^<>]+|[^<>|/]+\|)>\s*\Z")
# Where a template renders the messages of a completion otherwise than it did when they were written.
LAST_ANSWER = "Take the last answer as the completion and what is before it as the prompt" + OR_SKIP


@dataclass(frozen=True)
class Rendered:
    """The texts of a row. `whole` begins with `prompt`; the rest is the completion."""

    row: Row
    prompt: str
    whole: str
    is_chat: bool = False
    template_differs: bool = False
    # For completions of several messages: the (start, end) characters of `whole` that the assistant wrote.
    spans: tuple[tuple[int, int], ...] = ()
    notes: tuple[Note, ...] = ()


class Renderer:
    """Renders rows with one tokenizer's chat template."""

    def __init__(self, tokenizer: Any, template: ChatTemplate) -> None:
        self._template = template
        texts = sorted({text for text in added_tokens(tokenizer).values() if text}, key=len, reverse=True)
        self._added = re.compile("|".join(map(re.escape, texts)) or r"(?!)")
        self._longest_added = max(map(len, texts), default=0)
        self._arguments_as_text = False  # what the template took the arguments of the last row's tool calls as

    def render(self, row: Row) -> Rendered:
        """Return the row's texts; raises BadRow where the template cannot make them, DataError where there is none."""
        if isinstance(row.prompt, str) and isinstance(row.completion, str):
            _check_text(row, row.prompt, row.prompt + row.completion)
            return Rendered(row, row.prompt, row.prompt + row.completion)
        if not self._template.exists:
            raise data_error(
                row.place,
                "message lists need a tokenizer with a chat template",
                f"none in {self._template.name}",
                "Use a chat model's tokenizer, put a chat_template.jinja into the model's folder, or give texts.",
            )
        given, answer = _messages(row)
        notes: list[Note] = []
        has_developer = any(message["role"] == "developer" for message in given)
        if has_developer and "developer" not in self._template.source(row.tools):
            given = [{**m, "role": "system"} if m["role"] == "developer" else m for m in given]
            notes.append("developer as system")
        if not any(message.get("tool_calls") for message in given + answer):
            return self._render(row, given, answer, notes)
        # Most templates take the arguments of a tool call as an object, some as its JSON text.
        as_text = self._arguments_as_text
        first = self._render_calls(row, given, answer, notes, as_text)
        if isinstance(first, BadRow) or "arguments left out" in first.notes:
            second = self._render_calls(row, given, answer, notes, not as_text)
            if not isinstance(second, BadRow) and "arguments left out" not in second.notes:
                self._arguments_as_text = not as_text
                return second
        if isinstance(first, BadRow):
            raise first
        return first

    def _render_calls(
        self, row: Row, given: list[Message], answer: list[Message], notes: list[Note], as_text: bool
    ) -> Rendered | BadRow:
        given, answer = ([with_arguments(message, as_text) for message in part] for part in (given, answer))
        try:
            return self._render(row, given, answer, notes)
        except BadRow as bad:
            return bad

    def _render(self, row: Row, given: list[Message], answer: list[Message], notes: list[Note]) -> Rendered:
        is_prefilled = given[-1]["role"] == "assistant"
        prompt = self._text(row, given, is_generating=not is_prefilled, is_continued=is_prefilled)
        if is_prefilled:
            content = f"{given[-1]['content']}{answer[0]['content']}"
            given, answer = given[:-1], [{**given[-1], **answer[0], "content": content}, *answer[1:]]
        whole = self._text(row, given + answer)
        if len(answer) == 1 and not whole.startswith(prompt):
            with_thoughts = _with_thoughts(prompt, whole, str(answer[0]["content"]).strip())
            notes = notes if with_thoughts == whole else [*notes, "thoughts kept"]
            whole = with_thoughts
        template_differs = not whole.startswith(prompt)
        if template_differs and is_prefilled:
            rule = "the chat template must render the beginning of an answer the same, whatever follows it"
            raise BadRow(row.place, "chat template", rule, f"a difference at {self._difference(prompt, whole)}")
        if template_differs:
            generated, prompt = prompt, self._common_prompt(row, given, answer, prompt, whole)
        _check_text(row, prompt, whole)
        start = 0 if is_prefilled else len(prompt)
        notes = [*notes, *check_rendered(row.place, given, answer, row.tools, prompt, whole[start:])]
        spans = self._spans(row, given, answer, prompt, whole) if len(answer) > 1 else ()
        if template_differs and CLOSED_BLOCK.match(generated, len(prompt)):
            # An answer follows what the generation prompt has opened and closed again, so that is kept.
            added, template_differs = len(generated) - len(prompt), False
            prompt, whole = generated, generated + whole[len(prompt) :]
            spans = tuple((start + added, end + added) for start, end in spans)
            notes = [*notes, "closed block"]
        if EMPTY_THOUGHTS.match(whole, len(prompt)) and not EMPTY_THOUGHTS.match(str(answer[0]["content"])):
            notes = [*notes, "empty think block"]
        return Rendered(row, prompt, whole, True, template_differs, spans, tuple(notes))

    def _text(self, row: Row, messages: list[Message], is_generating: bool = False, is_continued: bool = False) -> str:
        return self._template.render(
            row.place,
            messages,
            row.tools,
            row.template_kwargs,
            is_generating=is_generating,
            is_continued=is_continued,
        )

    def _common_prompt(self, row: Row, given: list[Message], answer: list[Message], prompt: str, whole: str) -> str:
        """Return the text that both have in common, which ends before the answer's own first character."""
        # The answer may begin like the generation prompt's end ("<" of "<think>"): other answers show its start.
        end = min(common_start(prompt, whole), self._region(row, given + answer, len(given), whole)[0])
        for text in (prompt, whole):
            end = self._outside_token(text, end)
        # Anything of the prompt behind this point would be scored as if the assistant had written it.
        is_prompt_before = whole[:end].startswith(self._text(row, given))
        if not is_prompt_before and end < self._region(row, given + answer, len(given) - 1, whole)[1]:
            rule = "the chat template must render the prompt the same with and without the answer"
            raise BadRow(row.place, "chat template", rule, f"a difference at {self._difference(prompt, whole)}")
        return whole[:end]

    def _outside_token(self, text: str, end: int) -> int:
        """Return the last place up to `end` that does not cut an added token's text in two."""
        for found in self._added.finditer(text, max(0, end - self._longest_added)):
            if found.start() >= end:
                break
            if found.end() > end:
                return found.start()
        return end

    def _region(self, row: Row, messages: list[Message], index: int, whole: str) -> tuple[int, int]:
        """Return the (start, end) characters of `whole` that depend on what one of the messages says."""
        try:
            others = [self._text(row, _replaced(messages, index, said, has_calls=False)) for said in ("A", "B")]
        except BadRow:  # some templates refuse a tool's result without its call
            others = [self._text(row, _replaced(messages, index, said, has_calls=True)) for said in ("A", "B")]
        start = min(common_start(whole, other) for other in others)
        return start, len(whole) - min(common_end(whole, other) for other in others)

    def _spans(
        self, row: Row, given: list[Message], answer: list[Message], prompt: str, whole: str
    ) -> tuple[tuple[int, int], ...]:
        """Return the characters of the assistant's messages, each from its generation prompt to its end of turn.

        A template may render a message otherwise once others follow it (a think block only in the last one). It is
        then found in the whole by what changes there with its content.
        """
        messages = given + answer
        spans: list[tuple[int, int]] = []
        for index in range(len(given), len(messages)):
            if messages[index]["role"] != "assistant":
                continue
            before = self._text(row, messages[:index], is_generating=True) if index > len(given) else prompt
            until = self._text(row, messages[: index + 1]) if index < len(messages) - 1 else whole
            start, end = len(before), len(until)
            if not whole.startswith(before) or not whole.startswith(until):
                region = self._region(row, messages, index, whole)
                start = start if whole.startswith(before) else region[0]
                end = end if whole.startswith(until) else region[1]
            if start >= end or (spans and start < spans[-1][1]):
                rule = "the chat template must render the messages of a completion the same, whatever follows them"
                got = f"a difference at message {index - len(given)} of the completion with the template of"
                raise BadRow(row.place, "chat template", rule, f"{got} {self._template.name}", LAST_ANSWER)
            spans.append((start, end))
        return tuple(spans)

    @staticmethod
    def _difference(prompt: str, whole: str) -> str:
        end = common_start(prompt, whole)
        return shorten(whole[end : end + 40])


def _with_thoughts(prompt: str, whole: str, content: str) -> str:
    """Return the text with the thoughts that the template takes out of an answer, where generation begins with them.

    R1's template ends a prompt with <think> and keeps of an answer what is behind </think>.
    """
    opened = prompt.rstrip()
    visible = content.partition("</think>")[2].strip()
    end = whole.rfind(visible) + len(visible)
    is_lost = opened.endswith("<think>") and content.startswith("<think>") and visible and visible in whole
    if not is_lost or whole[:end].endswith(content):
        return whole
    return prompt + content.removeprefix("<think>").removeprefix(prompt[len(opened) :]) + whole[end:]


def _replaced(messages: list[Message], index: int, said: str, has_calls: bool) -> list[Message]:
    """Return the messages with one that says something else, and calls something else where it is to have calls."""
    message = messages[index]
    other: Message = {"role": message["role"], "content": said}
    calls = message.get("tool_calls")
    if has_calls and isinstance(calls, list):
        other["tool_calls"] = [{"id": "call00000", "type": "function", "function": {"name": said, "arguments": {}}}]
    return [*messages[:index], other, *messages[index + 1 :]]


def _messages(row: Row) -> tuple[list[Message], list[Message]]:
    assert isinstance(row.prompt, list), "prompt and completion are both texts or both message lists"
    assert isinstance(row.completion, list), "prompt and completion are both texts or both message lists"
    return row.prompt, row.completion


def _check_text(row: Row, prompt: str, whole: str) -> None:
    try:
        whole.encode("utf-8")
    except UnicodeEncodeError as error:
        rule, got = "the text must be valid Unicode", shorten(whole[error.start : error.start + 1])
        raise BadRow(row.place, "lone surrogate", rule, f"half a surrogate pair, {got}") from None
    if len(whole) <= len(prompt):
        rule = "the completion must not be empty after the chat template"
        raise BadRow(row.place, "empty completion", rule, shorten(row.completion))
