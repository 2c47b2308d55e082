"""Recognise what the fields of a source's records mean: the forms, their keys, and where a label stands."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from openkto.data.fields import find, is_empty, is_missing, top_name, words_of
from openkto.data.messages import ROLES, as_list, unpacked
from openkto.data.not_rows import check_is_a_row
from openkto.data.problems import BadRow
from openkto.data.row import RowSettings, field_names
from openkto.data.shapes import Shape, shape_of

TURN_MARKER = "\n\nAssistant:"
MEDIA_KEYS = ("images", "videos", "audios")
READ_BESIDE = ("system", "tools", "chat_template_kwargs")
KNOWN_FORMATS = (
    "prompt + completion + label; messages or conversations + label or kto_tag; prompt + chosen + rejected;"
    " conversations + chosen + rejected; chosen + rejected; the exports in docs/feedback_tools.md"
)
# What fields are called elsewhere, most telling first: read where nothing else can be meant, else named in the error.
PROMPT_NAMES = ("question", "instruction", "query", "input")
OTHER_PROMPT_NAMES = (
    *("prompt", "problem", "task", "request", "user", "text", "context", "source", "post", "article", "document"),
    *("passage", "dialogue", "history"),
)
COMPLETION_NAMES = ("completion", "response", "answer", "output", "generation", "reply", "prediction", "assistant")
LABEL_NAMES = (
    *("kto_tag", "label", "rating", "score", "feedback", "thumb", "thumbs", "vote", "upvote", "upvoted", "liked"),
    *("like", "good", "helpful", "accepted", "correct", "desirable", "preferred", "reward", "sentiment", "grade"),
)
NOT_TEXT_NAMES = ("id", "hash", "len", "length", "tokens", "score", "model", "type", "url", "rating")
# Two columns of 0 and 1 that say the opposite of each other: what the desirable and the undesirable one are called.
OPPOSITES = (
    *(("up", "down"), ("like", "dislike"), ("good", "bad"), ("positive", "negative"), ("helpful", "unhelpful")),
    *(("desirable", "undesirable"), ("accepted", "rejected"), ("correct", "incorrect"), ("right", "wrong")),
)


@dataclass(frozen=True)
class Format:
    """What the fields of a source's records mean; keys are paths.

    Without a prompt key, both completions of a pair begin with the prompt. In `turns` the label key is one of the
    messages' own. With a `counter_key`, that field says undesirable as the label key's says desirable.
    """

    kind: Literal["unpaired", "conversation", "turns", "pairs"]
    prompt_key: str | None
    completion_key: str = "completion"
    rejected_key: str = "rejected"
    label_key: str = "label"
    counter_key: str | None = None
    context_key: str | None = None  # a text that follows the prompt on a line of its own, where it is not empty
    shape: Shape | None = None
    note: str = ""  # what was recognised, where the names of the fields do not say it

    def read_names(self, record: dict[str, object], weight_key: str | None) -> set[str]:
        """Return the record's own fields that are read, or are looked at to be refused."""
        paths = (self.prompt_key, self.label_key, self.counter_key, self.context_key, weight_key)
        answers = (self.completion_key, self.rejected_key)
        names = {top_name(record, path) for path in (*paths, *answers) if path is not None}
        if self.shape is not None:
            names |= {top_name(record, path) for path in (*self.shape.needs, self.shape.tools)}
        return names | {*READ_BESIDE, *MEDIA_KEYS} | ({"label", "kto_tag"} if self.kind != "pairs" else set())


def recognise(
    place: str, record: dict[str, object], settings: RowSettings, ahead: Sequence[dict[str, object]] = ()
) -> Format:
    """Return the format of a source from its first record; raises BadRow where it is not a known one.

    A thumb is rare in what people wrote: whether records or their messages have labels is looked for in those `ahead`.
    """
    check_is_a_row(place, record)
    records = [record, *ahead]
    found = _by_keys(place, record, settings) or _by_names(place, records)
    if found is None:
        raise _unknown(place, record)
    if found.kind == "pairs" or (found.shape is not None and settings.label_key == "label"):
        return found
    key = _label_key(found, settings, records)
    counter = next((pair for known in records if (pair := _opposites(known, key)) is not None), None)
    if counter is not None:
        note = f"{counter[0]} says desirable and {counter[1]} undesirable; rows where neither is set are left out"
        return replace(found, label_key=counter[0], counter_key=counter[1], note=note)
    if found.kind == "conversation" and not any(find(known, key) for known in records):
        for name in (key, "kto_tag") if key == "label" else (key,):
            if any(has_label(known, found.prompt_key, name) for known in records):
                note = f"each message of {found.prompt_key} with a {name} is a row, and those before it are its prompt"
                return replace(found, kind="turns", label_key=name, note=note)
    return replace(found, label_key=key)


def has_label(record: dict[str, object], prompt_key: str | None, label_key: str) -> bool:
    """Return whether a message of a dialogue carries a label of its own."""
    return bool(labelled_turns(record, prompt_key, label_key))


def labelled_turns(record: dict[str, object], prompt_key: str | None, label_key: str) -> list[int]:
    """Return the positions of the messages with a label of their own, that is not null."""
    values = find(record, prompt_key) if prompt_key is not None else []
    messages = as_list(unpacked(values[0])) if values else []
    if not isinstance(messages, list):
        return []
    return [i for i, m in enumerate(messages) if isinstance(m, dict) and not all(map(is_missing, find(m, label_key)))]


def likely(record: dict[str, object], names: Sequence[str]) -> str | None:
    """Return the field that one of the names probably means: called so, or with it as a part of its name."""
    for name in names:
        for key in record:
            parts = words_of(key)
            if name == key.lower() or (name in parts and not set(NOT_TEXT_NAMES) - set(names) & set(parts)):
                return key
    return None


def _by_keys(place: str, record: dict[str, object], settings: RowSettings) -> Format | None:
    """Return the format that --input_key and --output_key name, where one of them is given."""
    if settings.input_key is None and settings.output_key is None:
        return None
    prompt_key = settings.input_key or "prompt"
    needed = [key for key in (settings.input_key, settings.output_key) if key is not None and not find(record, key)]
    if needed:
        rule = "--input_key and --output_key must name fields of the rows"
        cure = "Correct the keys; without them the format is recognised."
        raise BadRow(place, "unknown format", rule, f"no {', '.join(needed)} among {field_names(record)}", cure)
    if settings.output_key is None and {"chosen", "rejected"} <= record.keys():
        return Format("pairs", prompt_key, "chosen")
    prompt = find(record, prompt_key)
    is_dialogue = bool(prompt) and isinstance(as_list(unpacked(prompt[0])), list)
    if settings.output_key is None and "completion" not in record and is_dialogue:
        return Format("conversation", prompt_key)
    if settings.output_key is None and "completion" not in record:
        name = likely({key: None for key in record if key != prompt_key}, COMPLETION_NAMES)
        cure = "Name the field with the answer with --output_key" + (f", likely --output_key {name}." if name else ".")
        rule = "the answer must have a field, or stand as the last of a list of messages"
        raise BadRow(place, "unknown format", rule, f"the fields {field_names(record)}", cure)
    return Format("unpaired", prompt_key, settings.output_key or "completion")


def _by_names(place: str, records: Sequence[dict[str, object]]) -> Format | None:
    record = records[0]
    if {"prompt", "completion"} <= record.keys():
        return Format("unpaired", "prompt")
    if {"chosen", "rejected"} <= record.keys():
        return _pairs(place, record)
    for key in ("messages", "conversations"):
        if key in record:
            return Format("conversation", key)
    if {"instruction", "output"} <= record.keys():
        context = "input" if "input" in record else None
        note = f"instruction{' and input are' if context else ' is'} the prompt, and output the completion"
        return Format("unpaired", "instruction", "output", context_key=context, note=note)
    shape = shape_of(record)
    if shape is None:
        return None
    prompt, completion = shape.first(shape.prompt, [record]), shape.first(shape.completion, [record])
    label = shape.first(shape.label, records)
    paths = [path for path in (prompt, completion, shape.rejected, label) if path]
    note = f"{shape.name}, read from {', '.join(paths)}"
    return Format(
        shape.kind, prompt, completion or "completion", shape.rejected or "rejected", label or "label",
        shape=shape, note=note,
    )  # fmt: skip


def _pairs(place: str, record: dict[str, object]) -> Format:
    """Return the format of pairs, whose prompt stands in a field of its own or at the start of both completions."""
    key = next((key for key in ("prompt", "conversations", "messages") if key in record), None)
    if key is not None:
        return Format("pairs", key, "chosen")
    wanted = {*PROMPT_NAMES, *OTHER_PROMPT_NAMES}
    elsewhere = [
        name
        for name, value in record.items()
        if wanted & set(words_of(name))
        and not set(NOT_TEXT_NAMES) & set(words_of(name))
        and isinstance(value, (str, list))
    ]
    elsewhere = [name for name in elsewhere if name not in ("chosen", "rejected") and not is_empty(record[name])]
    if not elsewhere or _holds_prompt(record["chosen"], [record[name] for name in elsewhere]):
        return Format("pairs", None, "chosen")
    if set(elsewhere) <= {"instruction", "input"} and "instruction" in record:
        context = "input" if "input" in record else None
        note = "instruction and input are the prompt" if context else "instruction is the prompt"
        return Format("pairs", "instruction", "chosen", context_key=context, note=note)
    if len(elsewhere) == 1 and elsewhere[0] in PROMPT_NAMES:
        return Format("pairs", elsewhere[0], "chosen", note=f"{elsewhere[0]} is the prompt")
    rule = "a pair's prompt must stand in the field prompt, or both completions begin with it"
    cure = f"Name the field with the prompt, such as --input_key {elsewhere[0]}."
    raise BadRow(place, "unknown format", rule, f"the fields {field_names(record)}", cure)


def _holds_prompt(chosen: object, prompts: list[object]) -> bool:
    """Return whether a completion is a whole dialogue, or begins with the text of a field that may be the prompt."""
    messages = as_list(unpacked(chosen))
    if isinstance(messages, list):
        first = messages[0] if messages and isinstance(messages[0], dict) else {}
        role = first.get("role", first.get("from"))
        return isinstance(role, str) and ROLES.get(role.strip().lower()) != "assistant"
    if not isinstance(chosen, str):
        return False
    return TURN_MARKER in chosen or any(isinstance(text, str) and chosen.startswith(text) for text in prompts)


def _label_key(found: Format, settings: RowSettings, records: Sequence[dict[str, object]]) -> str:
    """Return the label's field: that of --label_key, or kto_tag where the records have no label but that."""
    key = settings.label_key
    if key == "label" and not any("label" in known for known in records):
        return "kto_tag" if any("kto_tag" in known for known in records) else key
    return key


def _opposites(record: dict[str, object], key: str) -> tuple[str, str] | None:
    """Return the fields that say desirable and undesirable, where the label's field has such a counterpart."""
    if key not in record:
        return None
    name = "".join(words_of(key))
    others = {"".join(words_of(other)): other for other in record if other != key}
    for good, bad in OPPOSITES:
        if bad in name and name.replace(bad, good) in others:
            return others[name.replace(bad, good)], key
        if bad not in name and good in name and name.replace(good, bad) in others:
            return key, others[name.replace(good, bad)]
    return None


def _unknown(place: str, record: dict[str, object]) -> BadRow:
    rule = f"a record must have one of the known formats ({KNOWN_FORMATS})"
    names = {
        "--input_key": likely(record, (*PROMPT_NAMES, *OTHER_PROMPT_NAMES)),
        "--output_key": likely(record, COMPLETION_NAMES),
        "--label_key": likely(record, LABEL_NAMES),
    }
    dialogue = next((key for key, value in record.items() if isinstance(unpacked(value), list)), None)
    if dialogue is not None:
        names = {"--input_key": dialogue, "--label_key": names["--label_key"]}
    advice = " ".join(f"{flag} {name}" for flag, name in names.items() if name is not None)
    if advice == "--label_key label":
        advice = ""  # it is read already
    cure = f"Name the fields with --input_key, --output_key and --label_key{f', likely {advice}' if advice else ''}."
    return BadRow(place, "unknown format", rule, f"the fields {field_names(record)}", cure)
