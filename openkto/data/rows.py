"""Turn a raw record into one or two canonical rows: the formats, their keys, the labels.

A source's format is recognised from its first record and holds for all of it, so a later record that lacks a field is a
bad row and never read as something else.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from openkto.data.labels import LabelReader
from openkto.data.messages import Message, assistant, read_messages, read_tools, trailing_assistants, unpacked
from openkto.data.problems import BadRow, shorten
from openkto.data.weights import read_weight

TURN_MARKER = "\n\nAssistant:"
MEDIA_KEYS = ("images", "videos", "audios")
KNOWN_FORMATS = (
    "prompt + completion + label; messages or conversations + label or kto_tag; prompt + chosen + rejected;"
    " conversations + chosen + rejected; chosen + rejected"
)


@dataclass(frozen=True)
class Row:
    """One labelled completion. Prompt and completion are both text, or both message lists."""

    place: str
    prompt: str | list[Message]
    completion: str | list[Message]
    label: bool
    tools: list[object] | None = None
    weight: float = 1.0


@dataclass(frozen=True)
class RowSettings:
    """How records are read: --input_key, --output_key, --label_key, --weight_key, --input_template, ..."""

    input_key: str | None = None
    output_key: str | None = None
    label_key: str = "label"
    input_template: str | None = None
    apply_chat_template: bool = False
    weight_key: str | None = None


@dataclass(frozen=True)
class Format:
    """What the keys of a source's records mean; without a prompt key, both completions begin with the prompt."""

    kind: Literal["unpaired", "conversation", "pairs"]
    prompt_key: str | None
    completion_key: str = "completion"
    label_key: str = "label"


class RowReader:
    """Reads the records of one source, in order."""

    def __init__(self, settings: RowSettings) -> None:
        self._settings = settings
        self._format: Format | None = None
        self._labels: dict[tuple[str, str], LabelReader] = {}  # by file and field

    @property
    def rows_per_record(self) -> int:
        """2 for pairs, else 1; also what an unreadable record counts in row numbers."""
        return 2 if self._format is not None and self._format.kind == "pairs" else 1

    def read(self, place: str, file: str, value: object) -> list[Row]:
        """Return the record's rows (chosen before rejected); raises BadRow."""
        if isinstance(value, BadRow):
            raise value
        if not isinstance(value, dict):
            raise BadRow(place, "not an object", "a record must be an object with named fields", shorten(value))
        if self._format is None:
            self._format = recognise(place, value, self._settings)
        for key in MEDIA_KEYS:
            if value.get(key):
                raise BadRow(place, "not text alone", f"{key} must be empty: only text is read", shorten(value[key]))
        if self._format.kind == "pairs":
            return self._read_pair(place, value, self._format.prompt_key)
        if self._format.kind == "conversation":
            assert self._format.prompt_key is not None, "a conversation has a key"
            prompt: object
            completion: object
            messages = read_messages(place, self._format.prompt_key, _field(place, value, self._format.prompt_key))
            prompt, completion = _split_conversation(place, self._format.prompt_key, messages)
        else:
            assert self._format.prompt_key is not None, "an unpaired row has a prompt key"
            prompt = _field(place, value, self._format.prompt_key)
            completion = _field(place, value, self._format.completion_key)
        label = self._read_label(place, file, value, self._format.label_key)
        return [self._row(place, value, prompt, completion, label)]

    def _read_label(self, place: str, file: str, record: dict[str, object], key: str) -> bool:
        given = _field(place, record, key, is_null_allowed=True)
        label = self._labels.setdefault((file, key), LabelReader()).read(place, given)
        other = {"label": "kto_tag", "kto_tag": "label"}.get(key)
        if self._settings.label_key != "label" or other is None or record.get(other) is None:
            return label
        if self._labels.setdefault((file, other), LabelReader()).read(place, record[other]) != label:
            rule = "label and kto_tag must say the same"
            raise BadRow(place, "two labels", rule, f"{key} {shorten(given)} and {other} {shorten(record[other])}")
        return label

    def _read_pair(self, place: str, record: dict[str, object], prompt_key: str | None) -> list[Row]:
        chosen, rejected = _field(place, record, "chosen"), _field(place, record, "rejected")
        prompt: object
        if prompt_key is None:
            prompt, chosen, rejected = implicit_prompt(place, chosen, rejected)
        else:
            prompt = _field(place, record, prompt_key)
            if isinstance(prompt, str) and isinstance(chosen, list) and isinstance(rejected, list):
                prompt, chosen, rejected = _repeated_prompt(place, prompt, chosen, rejected)
        rows = [
            self._row(place, record, prompt, chosen, label=True),
            self._row(place, record, prompt, rejected, label=False),
        ]
        if rows[0].completion == rows[1].completion:
            raise BadRow(place, "equal pair", "chosen and rejected must differ", f"{shorten(chosen)} for both")
        return rows

    def _row(self, place: str, record: dict[str, object], prompt: object, completion: object, label: bool) -> Row:
        """Bring prompt and completion to one kind, both texts or both message lists."""
        settings = self._settings
        key = settings.weight_key
        weight = 1.0 if key is None else read_weight(place, key, _field(place, record, key))
        system = record.get("system")
        if system is not None and not isinstance(system, str):
            raise BadRow(place, "wrong type", "system must be text", shorten(system))
        if isinstance(prompt, str) and not settings.apply_chat_template:
            if not isinstance(completion, str):
                rule = "the completion of a text prompt must be text"
                cure = "Write it as text, or pass --apply_chat_template to make the prompt a message."
                raise BadRow(place, "wrong type", rule, shorten(completion), cure)
            for key in ("system", "tools"):
                if record.get(key):
                    cure = f"Pass --apply_chat_template, or write the {key} into the prompt."
                    raise BadRow(place, key, f"{key} needs messages", "a text prompt", cure)
            _check_not_empty(place, completion)
            if settings.input_template is not None:
                prompt = settings.input_template.replace("{}", prompt)
            return Row(place, prompt, completion, label, weight=weight)
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        elif settings.input_template is not None:
            cure = "Leave --input_template out: messages go through the tokenizer's chat template."
            raise BadRow(place, "wrong type", "--input_template needs text prompts", shorten(prompt), cure)
        messages = read_messages(place, "the prompt", prompt)
        if system:
            if messages[0]["role"] == "system":
                raise BadRow(place, "system", "there must be one system prompt", "one in messages and one in system")
            messages = [{"role": "system", "content": system}, *messages]
        if messages[-1]["role"] == "assistant":
            raise BadRow(
                place, "prompt ends with assistant", "a prompt must not end with the assistant", shorten(prompt)
            )
        if isinstance(completion, str):
            completion = assistant(completion)
        answer = read_messages(place, "the completion", completion)
        if answer[0]["role"] != "assistant" or answer[-1]["role"] != "assistant":
            rule = "a completion must begin and end with an assistant message"
            got = f"the roles {', '.join(str(message['role']) for message in answer[:6])}"
            raise BadRow(place, "completion not by assistant", rule, got)
        for message in answer:
            if message["role"] == "assistant" and not message.get("tool_calls"):
                _check_not_empty(place, message["content"])
        return Row(place, messages, answer, label, read_tools(place, record.get("tools")), weight)


def recognise(place: str, record: dict[str, object], settings: RowSettings) -> Format:
    """Return the format of a source from its first record; raises BadRow where it is none that is known."""
    keys = record.keys()
    is_kto_tag = settings.label_key == "label" and "label" not in keys and "kto_tag" in keys
    label_key = "kto_tag" if is_kto_tag else settings.label_key
    if settings.input_key is not None or settings.output_key is not None:
        prompt_key = settings.input_key or "prompt"
        needed = [key for key in (settings.input_key, settings.output_key) if key is not None and key not in keys]
        if needed:
            rule = "--input_key and --output_key must name fields of the rows"
            cure = "Correct the keys; without them the format is recognised."
            raise BadRow(place, "unknown format", rule, f"no {', '.join(needed)} among {_listed(record)}", cure)
        if settings.output_key is None and {"chosen", "rejected"} <= keys:
            return Format("pairs", prompt_key)
        if settings.output_key is None and "completion" not in keys and isinstance(record[prompt_key], list):
            return Format("conversation", prompt_key, label_key=label_key)
        return Format("unpaired", prompt_key, settings.output_key or "completion", label_key)
    if {"prompt", "completion"} <= keys:
        return Format("unpaired", "prompt", label_key=label_key)
    if {"chosen", "rejected"} <= keys:
        return Format("pairs", next((key for key in ("prompt", "conversations", "messages") if key in keys), None))
    for key in ("messages", "conversations"):
        if key in keys:
            return Format("conversation", key, label_key=label_key)
    cure = "Name the fields with --input_key, --output_key and --label_key."
    rule = f"a record must have one of the known formats ({KNOWN_FORMATS})"
    raise BadRow(place, "unknown format", rule, f"the fields {_listed(record)}", cure)


def common_length(first: Sequence[object], second: Sequence[object]) -> int:
    """Return how many items (characters, messages) two sequences have in common at their start."""
    shorter = min(len(first), len(second))
    return next((i for i in range(shorter) if first[i] != second[i]), shorter)


def implicit_prompt(place: str, chosen: object, rejected: object) -> tuple[object, object, object]:
    """Return (prompt, chosen, rejected) of a pair that holds its prompt in both completions; raises BadRow."""
    rule = "chosen and rejected must begin with the same prompt and then differ"
    if isinstance(chosen, str) and isinstance(rejected, str):
        end = _common_text(chosen, rejected)
        if end == 0 or chosen == rejected:
            raise BadRow(place, "no common prompt", rule, f"{shorten(chosen, 40)} and {shorten(rejected, 40)}")
        return chosen[:end], chosen[end:], rejected[end:]
    if isinstance(chosen, list) and isinstance(rejected, list):
        answers = read_messages(place, "chosen", chosen), read_messages(place, "rejected", rejected)
        end = common_length(*answers)
        end -= trailing_assistants(answers[0][:end])
        if end == 0 or answers[0] == answers[1]:
            raise BadRow(place, "no common prompt", rule, f"{shorten(chosen, 40)} and {shorten(rejected, 40)}")
        return answers[0][:end], answers[0][end:], answers[1][end:]
    rule = "chosen and rejected without a prompt field must both be texts or both be message lists"
    raise BadRow(place, "wrong type", rule, f"{shorten(chosen, 40)} and {shorten(rejected, 40)}")


def _common_text(chosen: str, rejected: str) -> int:
    """Return where the common prompt of two texts ends: after a turn marker, else before a word's whitespace."""
    marker = chosen.rfind(TURN_MARKER)
    common = chosen[: common_length(chosen, rejected)]
    if marker >= 0 and marker == rejected.rfind(TURN_MARKER) and marker + len(TURN_MARKER) <= len(common):
        return marker + len(TURN_MARKER)
    for end in range(len(common), 0, -1):
        if not common[end - 1].isspace() and all(
            text[end : end + 1].isspace() and text[end:].strip() for text in (chosen, rejected)
        ):
            return end
    return 0


def _repeated_prompt(place: str, prompt: str, chosen: object, rejected: object) -> tuple[object, object, object]:
    """Return the pair whose message lists repeat the text prompt as their last common user message; else as it is."""
    try:
        messages, *answers = implicit_prompt(place, chosen, rejected)
    except BadRow:
        return prompt, chosen, rejected
    assert isinstance(messages, list), "message lists have a prompt of messages"
    is_same = messages[-1]["role"] == "user" and messages[-1]["content"] == prompt
    return (messages, answers[0], answers[1]) if is_same else (prompt, chosen, rejected)


def _split_conversation(place: str, key: str, messages: list[Message]) -> tuple[list[Message], list[Message]]:
    count = trailing_assistants(messages)
    if count == 0:
        rule = f"the last message of {key} must be the assistant's"
        raise BadRow(place, "completion not by assistant", rule, f"the role {messages[-1]['role']}")
    if count == len(messages):
        rule = f"{key} must hold a prompt before the assistant's messages"
        raise BadRow(place, "no messages", rule, "assistant messages alone")
    return messages[:-count], messages[-count:]


def _field(place: str, record: dict[str, object], key: str, is_null_allowed: bool = False) -> object:
    if key not in record:
        raise BadRow(place, "missing field", f"must have the field {key}", f"the fields {_listed(record)}")
    if record[key] is None and not is_null_allowed:
        raise BadRow(place, "null", f"{key} must have a value", "null")
    return unpacked(record[key])


def _check_not_empty(place: str, completion: object) -> None:
    if isinstance(completion, str) and not completion.strip():
        raise BadRow(place, "empty completion", "the completion must not be empty", shorten(completion))


def _listed(record: dict[str, object]) -> str:
    names = ", ".join(shorten(key, 30) for key in list(record)[:12])
    return names + (", ..." if len(record) > 12 else "") if record else "none"
