"""Turn a raw record into canonical rows, by the format of its source.

The format is recognised from a source's first record and holds for all of it, so a later record that lacks a field is a
bad row and never read as something else.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from openkto.data.fields import find, is_empty, is_missing
from openkto.data.formats import (
    LABEL_NAMES,
    MEDIA_KEYS,
    Format,
    labelled_turns,
    likely,
    recognise,
)
from openkto.data.implicit_prompt import implicit_prompt, repeated_prompt
from openkto.data.labels import LabelReader
from openkto.data.messages import Message, as_list, read_messages, trailing_assistants
from openkto.data.problems import BadRow, shorten
from openkto.data.row import Row, RowMaker, RowSettings, field_names, read_field
from openkto.data.template import ChatTemplate

MAX_UNREAD_NAMES = 100
NO_LABEL = "without a label"
LEFT_OUT_BY_SETTING = "with a label that --label_map or --label_threshold leaves out"


class RowReader:
    """Reads the records of one source, in order.

    Args:
        template: the tokenizer's, which texts are wrapped in; None takes them as they are.
        ahead: the first records, from which the format is recognised.
    """

    def __init__(
        self,
        settings: RowSettings,
        template: ChatTemplate | None = None,
        ahead: Sequence[object] = (),
    ) -> None:
        self._settings = settings
        self._maker = RowMaker(settings, template)
        self._format: Format | None = None
        self._labels: dict[tuple[str, str], LabelReader] = {}  # by file and field
        self._has_read_labels = False
        self._read: set[str] = set()
        self.unread: dict[str, None] = {}  # the names of fields with values that nothing reads, in order of appearance
        self.left_out: Counter[str] = Counter()  # rows that are not bad ones, by reason
        self._ahead = [value for value in ahead if isinstance(value, dict)]
        for record in self._ahead:
            try:
                self._recognise("", record)
            except BadRow:
                continue
            break

    @property
    def note(self) -> str:
        """What was recognised, where the fields' names do not say it themselves."""
        return self._format.note if self._format is not None else ""

    @property
    def is_pairs(self) -> bool:
        """Whether a record's rows belong together, so that one bad row takes the other with it."""
        return self._format is not None and self._format.kind == "pairs"

    def rows_of(self, value: object) -> int:
        """Return how many row numbers a record takes: 2 for a pair, one a labelled turn, else 1."""
        if self._format is None or self._format.kind not in ("pairs", "turns"):
            return 1
        if self._format.kind == "pairs":
            return 2
        if not isinstance(value, dict):
            return 1
        turns = labelled_turns(value, self._format.prompt_key, self._format.label_key)
        return max(1, len(turns))

    def read(self, place: str, file: str, value: object) -> list[Row]:
        """Return the record's rows (chosen before rejected, turns in order); raises BadRow."""
        if isinstance(value, BadRow):
            raise value
        if not isinstance(value, dict):
            raise BadRow(place, "not an object", "a record must be an object with named fields", shorten(value))
        found = self._format or self._recognise(place, value)
        if len(self.unread) < MAX_UNREAD_NAMES:
            others = value.keys() - self._read
            self.unread.update((name, None) for name in value if name in others and not is_empty(value[name]))
        for key in MEDIA_KEYS:
            if value.get(key):
                raise BadRow(place, "not only text", f"{key} must be empty: only text is read", shorten(value[key]))
        record = value if found.shape is None else found.shape.plain(value)
        if found.kind == "pairs":
            return self._read_pair(place, record, found)
        assert found.prompt_key is not None, "only pairs have no prompt field"
        if found.kind == "turns":
            return self._read_turns(place, file, record, found, found.prompt_key)
        label = self._read_label(place, file, record, found)
        if label is None:
            return []
        prompt: object = read_field(place, record, found.prompt_key)
        if found.kind == "conversation":
            messages = read_messages(place, found.prompt_key, prompt)
            prompt, completion = _split_conversation(place, found.prompt_key, messages)
            return [self._maker.make(place, record, prompt, completion, label)]
        prompt = _with_context(place, record, prompt, found)
        return [self._maker.make(place, record, prompt, read_field(place, record, found.completion_key), label)]

    def _recognise(self, place: str, record: dict[str, object]) -> Format:
        self._format = recognise(place, record, self._settings, self._ahead)
        self._read = self._format.read_names(record, self._settings.weight_key)
        self._ahead = []
        return self._format

    def _label(self, place: str, file: str, key: str, value: object) -> bool | None:
        """Return what a label says by the one reader of its file; None, counted, for a row to leave out."""
        reader = self._labels.get((file, key))
        if reader is None:
            reader = LabelReader(self._settings.label_map, self._settings.label_threshold, key)
            self._labels[file, key] = reader
        label = reader.read(place, value)
        if label is None:
            self.left_out[NO_LABEL if is_missing(value) or value == "" else LEFT_OUT_BY_SETTING] += 1
        self._has_read_labels = True
        return label

    def _read_label(self, place: str, file: str, record: dict[str, object], found: Format) -> bool | None:
        key = found.label_key
        if found.counter_key is not None:
            return self._read_opposites(place, file, record, key, found.counter_key)
        values = find(record, key)
        if found.shape is not None and all(map(is_missing, values)):
            self.left_out[NO_LABEL] += 1
            return None
        given = self._one_label(place, record, key, values)
        label = self._label(place, file, key, given)
        other = {"label": "kto_tag", "kto_tag": "label"}.get(key)
        if self._settings.label_key != "label" or other is None or is_missing(record.get(other)):
            return label
        if self._label(place, file, other, record[other]) != label:
            rule = "label and kto_tag must say the same"
            raise BadRow(place, "two labels", rule, f"{key} {shorten(given)} and {other} {shorten(record[other])}")
        return label

    def _one_label(self, place: str, record: dict[str, object], key: str, values: list[object]) -> object:
        """Return the label's value; raises BadRow where there is none, or several that differ."""
        if not values:
            rule, got = f"must have the field {key}", f"the fields {field_names(record)}"
            if self._has_read_labels:
                raise BadRow(place, "missing field", rule, got)
            name = likely(record, LABEL_NAMES)
            cure = "Name the field with the label with --label_key" + (f", likely --label_key {name}." if name else ".")
            raise BadRow(place, "missing field", rule, got, cure)
        said = [None if is_missing(value) else value for value in values]
        if any(value != said[0] for value in said):
            rule = f"the labels at {key} must say the same"
            cure = "Name one with --label_key, with a number or name for each *, or leave such rows out."
            raise BadRow(place, "several labels", rule, ", ".join(shorten(value, 20) for value in values[:6]), cure)
        return values[0]

    def _read_opposites(self, place: str, file: str, record: dict[str, object], good: str, bad: str) -> bool | None:
        """Return what two columns say of which at most one is set."""
        values = (read_field(place, record, key, is_null_allowed=True) for key in (good, bad))
        reader = self._labels.setdefault((file, good), LabelReader())
        is_good, is_bad = (not is_empty(value) and reader.read(place, value) for value in values)
        if is_good and is_bad:
            raise BadRow(place, "two labels", f"{good} and {bad} must not both be set", "both")
        if not is_good and not is_bad:
            self.left_out[NO_LABEL] += 1
            return None
        return bool(is_good)

    def _read_turns(
        self, place: str, file: str, record: dict[str, object], found: Format, prompt_key: str
    ) -> list[Row]:
        """Return a row for each labelled message: the assistant's messages that end with it, and what precedes them."""
        given = as_list(read_field(place, record, prompt_key))
        turns = labelled_turns(record, prompt_key, found.label_key)
        if not isinstance(given, list) or not turns:
            self.left_out[NO_LABEL] += 1
            return []
        bare = [_without(member, found.label_key) for member in given]
        messages = read_messages(place, prompt_key, bare)
        rows = []
        for offset, position in enumerate(turns):
            label = self._label(place, file, found.label_key, find(given[position], found.label_key)[0])
            if label is None:
                continue
            if messages[position]["role"] != "assistant":
                rule = "a message with a label must be the assistant's"
                raise BadRow(place, "label", rule, f"one of the role {messages[position]['role']}")
            prompt, completion = _split_conversation(place, prompt_key, messages[: position + 1])
            rows.append(replace(self._maker.make(place, record, prompt, completion, label), offset=offset))
        return rows

    def _read_pair(self, place: str, record: dict[str, object], found: Format) -> list[Row]:
        chosen, rejected = (read_field(place, record, key) for key in (found.completion_key, found.rejected_key))
        prompt: object
        if found.prompt_key is None:
            prompt, chosen, rejected = implicit_prompt(place, as_list(chosen), as_list(rejected))
        else:
            prompt = _with_context(place, record, read_field(place, record, found.prompt_key), found)
            if isinstance(prompt, str) and isinstance(as_list(chosen), list) and isinstance(as_list(rejected), list):
                prompt, chosen, rejected = repeated_prompt(place, prompt, as_list(chosen), as_list(rejected))
        rows = [
            self._maker.make(place, record, prompt, chosen, label=True),
            replace(self._maker.make(place, record, prompt, rejected, label=False), offset=1),
        ]
        if rows[0].completion == rows[1].completion:
            rule = f"{found.completion_key} and {found.rejected_key} must differ"
            raise BadRow(place, "equal pair", rule, f"{shorten(chosen)} for both")
        return rows


def _split_conversation(place: str, key: str, messages: list[Message]) -> tuple[list[Message], list[Message]]:
    count = trailing_assistants(messages)
    if count == 0:
        rule = f"the last message of {key} must be the assistant's"
        raise BadRow(place, "completion not by assistant", rule, f"the role {messages[-1]['role']}")
    if count == len(messages):
        rule = f"{key} must hold a prompt before the assistant's messages"
        raise BadRow(place, "no messages", rule, "only assistant messages")
    return messages[:-count], messages[-count:]


def _with_context(place: str, record: dict[str, object], prompt: object, found: Format) -> object:
    """Return an instruction with its input on the next line, where it has one (the form of Alpaca)."""
    if found.context_key is None or is_empty(record.get(found.context_key)):
        return prompt
    context = read_field(place, record, found.context_key)
    if not isinstance(prompt, str) or not isinstance(context, str):
        rule = f"{found.prompt_key} and {found.context_key} must be texts"
        raise BadRow(place, "wrong type", rule, shorten(prompt if isinstance(context, str) else context))
    return f"{prompt}\n{context}"


def _without(member: object, label_key: str) -> object:
    """Return a message without its label, which is nothing that a template may show."""
    if not isinstance(member, dict):
        return member
    own = label_key if label_key in member else label_key.split(".")[0]
    return {name: value for name, value in member.items() if name != own}
