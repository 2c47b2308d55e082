"""Render a row to text: what the model is given, and that with the answer behind it.

Messages go through the tokenizer's own chat template, so the prompt's text is the one that generation starts from.
"""

from dataclasses import dataclass
from typing import Any

from openkto.data.messages import Message
from openkto.data.problems import BadRow, data_error, shorten
from openkto.data.rows import Row, common_length


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


class Renderer:
    """Renders rows with one tokenizer's chat template."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def render(self, row: Row) -> Rendered:
        """Return the row's texts; raises BadRow where the template cannot make them, DataError where there is none."""
        if isinstance(row.prompt, str) and isinstance(row.completion, str):
            return _checked(Rendered(row, row.prompt, row.prompt + row.completion))
        given, answer = _messages(row)
        if self._tokenizer.chat_template is None:
            raise data_error(
                row.place,
                "message lists need a tokenizer with a chat template",
                f"none in {self._tokenizer.name_or_path or 'the tokenizer'}",
                "Use a chat model's tokenizer, put a chat_template.jinja into the model's folder, or give texts.",
            )
        prompt = self._text(row, given, is_generating=True)
        whole = self._text(row, given + answer, is_generating=False)
        template_differs = not whole.startswith(prompt)
        if template_differs:
            prompt = self._common_prompt(row, prompt, whole)
        spans = self._spans(row, prompt, whole) if len(answer) > 1 else ()
        return _checked(Rendered(row, prompt, whole, is_chat=True, template_differs=template_differs, spans=spans))

    def _text(self, row: Row, messages: list[Message], is_generating: bool) -> str:
        # Templates are programs of the model's author: on messages that they do not expect they raise anything.
        try:
            text = self._tokenizer.apply_chat_template(
                messages,
                tools=row.tools,
                add_generation_prompt=is_generating,
                continue_final_message=False,
                tokenize=False,
                return_dict=False,
            )
        except Exception as error:
            rule = "the messages must be ones that the tokenizer's chat template takes"
            raise BadRow(row.place, "chat template", rule, f"{type(error).__name__}: {shorten(str(error))}") from None
        assert isinstance(text, str), "apply_chat_template(tokenize=False) returns text"
        return text

    def _common_prompt(self, row: Row, prompt: str, whole: str) -> str:
        """Return the text that both have in common, which ends before the answer's own first character."""
        given, answer = _messages(row)
        end = common_length(prompt, whole)
        content = str(answer[0]["content"]).lstrip()
        if content:
            # The answer may begin like the generation prompt's end ("<" of "<think>"): another answer shows its start.
            other: Message = {**answer[0], "content": "B" if content.startswith("A") else "A"}
            end = min(end, common_length(whole, self._text(row, [*given, other, *answer[1:]], is_generating=False)))
        # Anything of the prompt behind this point would be scored as if the assistant had written it.
        if not whole[:end].startswith(self._text(row, given, is_generating=False)):
            rule = "the chat template must render the prompt alike with and without the answer"
            raise BadRow(row.place, "chat template", rule, f"a difference at {shorten(whole[end : end + 40])}")
        return whole[:end]

    def _spans(self, row: Row, prompt: str, whole: str) -> tuple[tuple[int, int], ...]:
        """Return the characters of the assistant's messages, each from its generation prompt to its end of turn."""
        given, answer = _messages(row)
        spans = []
        for index, message in enumerate(answer):
            if message["role"] != "assistant":
                continue
            so_far = given + answer[:index]
            start = prompt if index == 0 else self._text(row, so_far, is_generating=True)
            is_last = index == len(answer) - 1
            end = whole if is_last else self._text(row, [*so_far, message], is_generating=False)
            if not whole.startswith(start) or not whole.startswith(end):
                rule = "the chat template must render the messages of a completion alike whatever follows them"
                raise BadRow(row.place, "chat template", rule, f"a difference at message {index} of the completion")
            spans.append((len(start), len(end)))
        return tuple(spans)


def _messages(row: Row) -> tuple[list[Message], list[Message]]:
    assert isinstance(row.prompt, list), "prompt and completion are both texts or both message lists"
    assert isinstance(row.completion, list), "prompt and completion are both texts or both message lists"
    return row.prompt, row.completion


def _checked(rendered: Rendered) -> Rendered:
    place = rendered.row.place
    try:
        rendered.whole.encode("utf-8")
    except UnicodeEncodeError as error:
        got = shorten(rendered.whole[error.start : error.start + 1])
        raise BadRow(
            place, "lone surrogate", "the text must be valid Unicode", f"half a surrogate pair, {got}"
        ) from None
    if len(rendered.whole) <= len(rendered.prompt):
        rule = "the completion must not be empty after the chat template"
        raise BadRow(place, "empty completion", rule, shorten(rendered.row.completion))
    return rendered
