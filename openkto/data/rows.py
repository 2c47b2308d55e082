"""Read a record's fields: the formats, their keys, the labels, the prompt and the completion that `row` makes a row of.

A source's format is recognised from its first record and holds for all of it, so a later record that lacks a field is a
bad row and never read as something else.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from openkto.data.labels import LabelReader
from openkto.data.messages import Message, read_messages, trailing_assistants
from openkto.data.problems import BadRow, shorten
from openkto.data.row import Row, RowMaker, RowSettings, field_names, read_field

TURN_MARKER = "\n\nAssistant:"
MEDIA_KEYS = ("images", "videos", "audios")
READ_BESIDE = ("system", "tools", "chat_template_kwargs")
KNOWN_FORMATS = (
    "prompt + completion + label; messages or conversations + label or kto_tag; prompt + chosen + rejected;"
    " conversations + chosen + rejected; chosen + rejected"
)


@dataclass(frozen=True)
class Format:
    """What the keys of a source's records mean; without a prompt key, both completions begin with the prompt."""

    kind: Literal["unpaired", "conversation", "pairs"]
    prompt_key: str | None
    completion_key: str = "completion"
    label_key: str = "label"


class RowReader:
    """Reads the records of one source, in order.

    Args:
        is_rendered: says whether a text holds the chat template's markup; None where there is no template.
    """

    def __init__(self, settings: RowSettings, is_rendered: Callable[[str], bool] | None = None) -> None:
        self._settings = settings
        self._maker = RowMaker(settings, is_rendered)
        self.unread: dict[str, None] = {}  # the names of fields with values that nothing reads, in order of appearance
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
        self._note_unread(self._format, value)
        if self._format.kind == "pairs":
            return self._read_pair(place, value, self._format.prompt_key)
        if self._format.kind == "conversation":
            assert self._format.prompt_key is not None, "a conversation has a key"
            prompt: object
            completion: object
            messages = read_messages(place, self._format.prompt_key, read_field(place, value, self._format.prompt_key))
            prompt, completion = _split_conversation(place, self._format.prompt_key, messages)
        else:
            assert self._format.prompt_key is not None, "an unpaired row has a prompt key"
            prompt = read_field(place, value, self._format.prompt_key)
            completion = read_field(place, value, self._format.completion_key)
        label = self._read_label(place, file, value, self._format.label_key)
        return [self._maker.make(place, value, prompt, completion, label)]

    def _read_label(self, place: str, file: str, record: dict[str, object], key: str) -> bool:
        given = read_field(place, record, key, is_null_allowed=True)
        label = self._labels.setdefault((file, key), LabelReader()).read(place, given)
        other = {"label": "kto_tag", "kto_tag": "label"}.get(key)
        if self._settings.label_key != "label" or other is None or record.get(other) is None:
            return label
        if self._labels.setdefault((file, other), LabelReader()).read(place, record[other]) != label:
            rule = "label and kto_tag must say the same"
            raise BadRow(place, "two labels", rule, f"{key} {shorten(given)} and {other} {shorten(record[other])}")
        return label

    def _read_pair(self, place: str, record: dict[str, object], prompt_key: str | None) -> list[Row]:
        chosen, rejected = read_field(place, record, "chosen"), read_field(place, record, "rejected")
        prompt: object
        if prompt_key is None:
            prompt, chosen, rejected = implicit_prompt(place, chosen, rejected)
        else:
            prompt = read_field(place, record, prompt_key)
            if isinstance(prompt, str) and isinstance(chosen, list) and isinstance(rejected, list):
                prompt, chosen, rejected = _repeated_prompt(place, prompt, chosen, rejected)
        rows = [
            self._maker.make(place, record, prompt, chosen, label=True),
            self._maker.make(place, record, prompt, rejected, label=False),
        ]
        if rows[0].completion == rows[1].completion:
            raise BadRow(place, "equal pair", "chosen and rejected must differ", f"{shorten(chosen)} for both")
        return rows

    def _note_unread(self, form: Format, record: dict[str, object]) -> None:
        settings = self._settings
        read = {form.prompt_key, settings.weight_key, *READ_BESIDE, *MEDIA_KEYS}
        if form.kind == "pairs":
            read |= {"chosen", "rejected"}
        else:
            read |= {form.label_key} | ({"label", "kto_tag"} if settings.label_key == "label" else set())
        if form.kind == "unpaired":
            read.add(form.completion_key)
        for name, value in record.items():
            is_empty = value is None or (isinstance(value, (str, list, dict)) and not value)
            if name not in read and not is_empty:
                self.unread[name] = None


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
            raise BadRow(place, "unknown format", rule, f"no {', '.join(needed)} among {field_names(record)}", cure)
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
    raise BadRow(place, "unknown format", rule, f"the fields {field_names(record)}", cure)


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
