"""Check that a row's content, reasoning and tool calls are in its rendered text; note missing tools and arguments."""

import json
import re
from functools import cached_property

from openkto.data.messages import Message, calls_of, names_of_tools, reasoning_of
from openkto.data.notes import Note
from openkto.data.problems import ALSO_SKIP, BadRow, shorten

# Templates may write a message's thoughts apart from the rest, or leave those of earlier turns out.
THOUGHTS = re.compile(r"</?think(?:ing)?>")
CURES = {
    "system": "Write it into the first user message, or take a model whose chat template has system messages."
    + ALSO_SKIP,
    "reasoning": "Leave it out of the row, or write it into the content as the model does; where thinking is a mode of"
    " the template pass --chat_template_kwargs." + ALSO_SKIP,
    "tool call": "Write the call into the content as the model does, or take a model whose chat template has tool"
    " calls." + ALSO_SKIP,
}
CURE = "Correct the chat template or the row." + ALSO_SKIP


class Text:
    """A rendered text to look for parts in; templates may trim, escape or break up what they are given."""

    def __init__(self, text: str) -> None:
        self.plain = text

    @cached_property
    def letters(self) -> str:
        return _letters(self.plain)

    def has(self, part: str) -> bool:
        """Return whether a part is there: as it is, as JSON writes it, or except for spaces and punctuation."""
        part = part.strip()
        if part in self.plain:
            return True
        forms = (part, json.dumps(part)[1:-1], json.dumps(part, ensure_ascii=False)[1:-1])
        return any(form in self.plain or (_letters(form) and _letters(form) in self.letters) for form in forms)


def check_rendered(
    place: str,
    given: list[Message],
    answer: list[Message],
    tools: list[object] | None,
    prompt: str,
    completion: str,
) -> list[Note]:
    """Raise BadRow where a message is not in the text; return what else is left out.

    Args:
        given, answer: the messages of the prompt and of the completion.
        prompt, completion: the text, parted where the completion begins.
    """
    before, after = Text(prompt), Text(completion)
    for messages, text in ((given, before), (answer, after)):
        for message in messages:
            _check_content(place, message, text, is_past=messages is given)
            for call in calls_of(message):
                _check_call(place, call, text)
    notes: list[Note] = []
    if not all(before.has(reasoning_of(message)) for message in given):
        notes.append("reasoning left out")
    if not all(before.has(name) for name in names_of_tools(tools)):
        notes.append("tools left out")
    calls = [(call, text) for found, text in ((given, before), (answer, after)) for m in found for call in calls_of(m)]
    if not all(text.has(form) or text.has(str(leaf)) for call, text in calls for leaf, form in _leaves(call)):
        notes.append("arguments left out")
    return notes


def _check_content(place: str, message: Message, text: Text, is_past: bool) -> None:
    role, content = str(message["role"]), str(message["content"])
    parts = THOUGHTS.split(content) if role == "assistant" else [content]
    for part in parts[-1:] if is_past else parts:
        if not text.has(part):
            raise _left_out(place, role, f"the {role} message's content", part)
    if not is_past and not text.has(reasoning_of(message)):
        raise _left_out(place, "reasoning", "a message's reasoning", reasoning_of(message))


def _check_call(place: str, call: dict[str, object], text: Text) -> None:
    name, arguments = call.get("name"), call.get("arguments")
    if isinstance(name, str) and not text.has(name):
        raise _left_out(place, "tool call", "a message's tool calls", name)
    # A template that puts tojson behind text writes it with quotes around; one that prints an object writes Python.
    is_text = isinstance(arguments, str)
    wrong = json.dumps(arguments, ensure_ascii=False) if is_text else repr(arguments)
    if arguments and wrong in text.plain and (is_text or _is_no_json(wrong)):
        rule = "the chat template must write a tool call's arguments as a JSON object"
        raise BadRow(place, "tool call", rule, shorten(wrong), CURE)


def _is_no_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return True
    return False


def _leaves(call: dict[str, object]) -> list[tuple[object, str]]:
    """Return the names and values of a call's arguments, each with its JSON; null is left out by many templates."""
    pending, leaves = [call.get("arguments")], []
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            pending += [*value.keys(), *value.values()]
        elif isinstance(value, list):
            pending += value
        elif value is not None:
            leaves.append((value, value if isinstance(value, str) else json.dumps(value)))
    return leaves


def _letters(text: str) -> str:
    return "".join(filter(str.isalnum, text))


def _left_out(place: str, what: str, named: str, part: str) -> BadRow:
    got = f"a text without {shorten(part.strip())}"
    return BadRow(place, f"{what} not rendered", f"the chat template must render {named}", got, CURES.get(what, CURE))
