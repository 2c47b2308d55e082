"""Make the canonical row of what was read: a prompt and a completion, both texts or both message lists."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from openkto.data.chat_signs import END_MARKUP, signs_in, signs_of_transcript
from openkto.data.fields import find
from openkto.data.messages import (
    Message,
    assistant,
    is_in_python,
    read_messages,
    read_template_kwargs,
    read_tools,
    trailing_assistants,
    unpacked,
)
from openkto.data.notes import Note
from openkto.data.problems import OR_SKIP, BadRow, shorten
from openkto.data.template import ChatTemplate
from openkto.data.weights import read_weight


@dataclass(frozen=True)
class Row:
    """One labelled completion. Prompt and completion are both text, or both message lists.

    `offset` is its place among the rows of its record: 0 for chosen, 1 for rejected, i for the i-th labelled turn.
    """

    place: str
    prompt: str | list[Message]
    completion: str | list[Message]
    label: bool
    tools: list[object] | None = None
    weight: float = 1.0
    template_kwargs: dict[str, object] = field(default_factory=dict)
    notes: tuple[Note, ...] = ()
    offset: int = 0


@dataclass(frozen=True)
class RowSettings:
    """How records become rows and texts; each field is the setting of its name, as a value.

    Args:
        apply_chat_template: whether text prompts are wrapped; None: where the tokenizer has a chat template, unless
            there is an input_template.
        weight_key: the field with each row's own weight; None weighs every row 1.
        chat_template_kwargs: arguments for the chat template; a row's own go over them.
        template_date: the day, YYYY-MM-DD, that a chat template which prints today's date prints; None is today.
        label_map: what each label means, and nothing else does; None leaves the row out.
        label_threshold: reads scores: desirable from the larger number, undesirable below it, or up to the smaller.
    """

    input_key: str | None = None
    output_key: str | None = None
    label_key: str = "label"
    input_template: str | None = None
    apply_chat_template: bool | None = None
    weight_key: str | None = None
    chat_template_kwargs: dict[str, object] = field(default_factory=dict)
    template_date: str | None = None
    label_map: dict[str, bool | None] | None = None
    label_threshold: tuple[float, ...] = ()

    def of_source(self, own: Mapping[str, Any]) -> "RowSettings":
        """Return the settings of a source that has some of its own."""
        return replace(self, **own)


class RowMaker:
    """Makes rows with one source's settings.

    Args:
        template: the tokenizer's, which texts are wrapped in; None takes them as they are.
    """

    def __init__(self, settings: RowSettings, template: ChatTemplate | None = None) -> None:
        self._settings = settings
        self._template = template

    def make(self, place: str, record: dict[str, object], prompt: object, completion: object, label: bool) -> Row:
        """Return the row of a prompt and a completion with what the record says beside them; raises BadRow."""
        key = self._settings.weight_key
        weight = 1.0 if key is None else read_weight(place, key, read_field(place, record, key))
        system = record.get("system")
        if system is not None and not isinstance(system, str):
            raise BadRow(place, "wrong type", "system must be text", shorten(system))
        notes: tuple[Note, ...] = ()
        if isinstance(prompt, str):
            if not prompt.strip():
                raise BadRow(place, "empty prompt", "the prompt must not be empty", shorten(prompt))
            if isinstance(completion, str) and begins_with(completion, prompt):
                notes = ("repeats the prompt",)
            form = self._form_of_text(prompt)
            if form in ("left plain", "already rendered", "template missing", None):
                notes = notes if form is None else (*notes, form)
                notes = notes if form == "already rendered" else (*notes, *signs_in(prompt))
                return self._text_row(place, record, prompt, completion, label, weight, notes)
            notes = (*notes, "wrapped", *(() if form == "wrapped" else (form,)))
            if form == "wrapped":
                notes = (*notes, *signs_of_transcript(prompt, completion))
            if isinstance(completion, str) and completion.startswith(" ") and not completion[1:2].isspace():
                completion = completion[1:]  # it joined two plain texts; a turn begins without it
            prompt = [{"role": "user", "content": prompt}]
        elif self._settings.input_template is not None:
            cure = "Leave --input_template out: messages go through the tokenizer's chat template."
            raise BadRow(place, "wrong type", "--input_template needs text prompts", shorten(prompt), cure)
        return self._message_row(place, record, prompt, completion, label, weight, notes)

    def _form_of_text(self, prompt: str) -> Note | None:
        """Return what becomes of a text prompt; None where it stays as it is and nothing speaks against that."""
        settings, template = self._settings, self._template
        has_template = template is not None and template.exists
        is_rendered = template is not None and has_template and template.is_rendered(prompt)
        if settings.apply_chat_template:
            return "wrapped twice" if is_rendered else "wrapped"
        if is_rendered:
            return "already rendered"
        is_plain = settings.apply_chat_template is False or settings.input_template is not None
        if has_template:
            return "left plain" if is_plain else "wrapped"
        return "template missing" if template is not None and template.is_missing and not is_plain else None

    def _signs_in_answer(self, texts: list[str]) -> tuple[Note, ...]:
        """Return what an answer holds that a model should not learn to write."""
        notes: tuple[Note, ...] = ("carriage returns",) if any("\r\n" in text for text in texts) else ()
        found = [match.group() for text in texts for match in END_MARKUP.finditer(text)]
        is_foreign = self._template is not None and not all(map(self._template.is_special, found))
        return (*notes, "foreign end") if is_foreign else notes

    def _text_row(
        self,
        place: str,
        record: dict[str, object],
        prompt: str,
        completion: object,
        label: bool,
        weight: float,
        notes: tuple[Note, ...],
    ) -> Row:
        if not isinstance(completion, str):
            rule = "the completion of a text prompt must be text"
            cure = "Write it as text, or pass --apply_chat_template to make the prompt a message."
            raise BadRow(place, "wrong type", rule, shorten(completion), cure)
        for key in ("system", "tools", "chat_template_kwargs"):
            if record.get(key):
                cure = f"Pass --apply_chat_template, or write the {key} into the prompt."
                raise BadRow(place, key, f"{key} needs messages", "a text prompt", cure)
        _check_not_empty(place, completion)
        if self._settings.input_template is not None:
            prompt = self._settings.input_template.replace("{}", prompt)
        notes = (*notes, *self._signs_in_answer([completion]))
        return Row(place, prompt, completion, label, weight=weight, notes=notes)

    def _message_row(
        self,
        place: str,
        record: dict[str, object],
        prompt: object,
        completion: object,
        label: bool,
        weight: float,
        notes: tuple[Note, ...],
    ) -> Row:
        system = record.get("system")
        messages = read_messages(place, "the prompt", prompt)
        completion = assistant(completion) if isinstance(completion, str) else completion
        messages, answer = without_prompt(messages, read_messages(place, "the completion", completion))
        if system:
            if messages[0]["role"] == "system":
                raise BadRow(place, "system", "there must be one system prompt", "one in messages and one in system")
            messages = [{"role": "system", "content": system}, *messages]
        _check_prompt(place, messages)
        _check_answer(place, answer)
        if messages[-1]["role"] == "assistant":
            notes = (*notes, "prefilled")
            if begins_with(str(answer[0]["content"]), str(messages[-1]["content"])):
                notes = (*notes, "repeats the prompt")
        if "wrapped twice" not in notes:
            notes = (*notes, *signs_in(messages))
        said = [str(message["content"]) for message in answer if message["role"] == "assistant"]
        notes = (*notes, *self._signs_in_answer(said))
        kwargs = {
            **self._settings.chat_template_kwargs,
            **read_template_kwargs(place, record.get("chat_template_kwargs")),
        }
        return Row(place, messages, answer, label, read_tools(place, record.get("tools")), weight, kwargs, notes)


def begins_with(completion: str, prompt: str) -> bool:
    """Return whether a completion begins with the whole of its own prompt, and not merely with a word's letters."""
    start, rest = prompt.strip(), completion.lstrip()
    if not start or not rest.startswith(start):
        return False
    following = rest[len(start) : len(start) + 1]
    return bool(rest[len(start) :].strip()) and not (start[-1].isalnum() and following.isalnum())


def without_prompt(messages: list[Message], answer: list[Message]) -> tuple[list[Message], list[Message]]:
    """Return (prompt, answer) where the answer is a whole conversation, which repeats its prompt."""
    if answer[: len(messages)] == messages and len(answer) > len(messages):
        return messages, answer[len(messages) :]
    before = answer[: len(answer) - trailing_assistants(answer)]
    if len(before) < len(answer) and before[-len(messages) :] == messages:
        return before, answer[len(before) :]
    return messages, answer


def _check_prompt(place: str, messages: list[Message]) -> None:
    last = messages[-1]
    text = str(last["content"])
    if last["role"] == "user" and not text.strip():
        raise BadRow(place, "empty prompt", "the last user message must not be empty", shorten(text))
    if last["role"] == "assistant" and (not text.strip() or last.get("tool_calls")):
        rule = "a prompt that ends with the assistant must end with the text that the completion continues"
        cure = "Let the prompt end with the user's message, or put the assistant's last message into the completion."
        raise BadRow(place, "prompt ends with assistant", rule, shorten(last), cure)


def _check_answer(place: str, answer: list[Message]) -> None:
    if answer[0]["role"] != "assistant" or answer[-1]["role"] != "assistant":
        rule = "a completion must begin and end with an assistant message"
        got = f"the roles {', '.join(str(message['role']) for message in answer[:6])}"
        raise BadRow(place, "completion not by assistant", rule, got)
    for message in answer:
        if message["role"] == "assistant" and not message.get("tool_calls"):
            _check_not_empty(place, message["content"])


def _check_not_empty(place: str, completion: object) -> None:
    if isinstance(completion, str) and not completion.strip():
        raise BadRow(place, "empty completion", "the completion must not be empty", shorten(completion))


def read_field(place: str, record: dict[str, object], key: str, is_null_allowed: bool = False) -> object:
    """Return the value at a path, text that is the JSON of messages unpacked; raises BadRow."""
    values = find(record, key)
    if not values:
        raise BadRow(place, "missing field", f"must have the field {key}", f"the fields {field_names(record)}")
    if len(values) > 1:
        cure = "Name one with --input_key and --output_key, with a name for each *."
        raise BadRow(place, "several values", f"{key} must be one value", f"{len(values)}", cure)
    if values[0] is None and not is_null_allowed:
        raise BadRow(place, "null", f"{key} must have a value", "null")
    if is_in_python(values[0]):
        cure = "This is Python's notation: write it with json.dumps" + OR_SKIP
        raise BadRow(place, "wrong type", f"{key} must be text or a list of messages", shorten(values[0]), cure)
    return unpacked(values[0])


def field_names(record: dict[str, object]) -> str:
    """Return the names of a record's fields, a dozen at most."""
    names = ", ".join(shorten(key, 30) for key in list(record)[:12])
    return names + (", ..." if len(record) > 12 else "") if record else "none"
