"""Read an entry of --dataset or --eval_dataset that is a mapping: a path with settings of its own."""

from dataclasses import dataclass, field
from pathlib import Path

from openkto.config.data_checks import check_threshold, label_meanings
from openkto.data.json_files import parse_json
from openkto.data.problems import data_error, shorten

# What an entry may set of how its records are read, and of where they lie; each by the name of its flag.
KEYS = ("input_key", "output_key", "label_key", "weight_key")
LABELS = ("label_map", "label_threshold")
PLACES = ("split", "config", "revision")


@dataclass(frozen=True)
class Entry:
    """A path, glob, folder or Hub name, and what holds for it only."""

    path: str
    place: dict[str, str] = field(default_factory=dict)
    settings: dict[str, object] = field(default_factory=dict)


def read_entry(item: str | Path) -> Entry:
    """Return an entry; a mapping stands as its JSON text, {"path": ..., "label_key": ...}.

    Raises:
        DataError: the mapping has other members than are known, or values that are not text.
        ConfigError: its label_map or label_threshold is none.
    """
    text = str(item)
    if not text.startswith("{"):
        return Entry(text)
    try:
        members = parse_json(text)
    except (ValueError, RecursionError):
        members = None
    known = ("path", *PLACES, *KEYS, *LABELS)
    is_good = isinstance(members, dict) and "path" in members and members.keys() <= set(known)
    if not is_good or not isinstance(members, dict) or not _are_texts(members):
        rule = f"an entry must be a path, or a mapping of path and any of {', '.join(known[1:])} (eval_dataset: name)"
        raise data_error("dataset", rule, shorten(text, 120), "Correct the entry.")
    return Entry(
        str(members["path"]),
        {name: str(members[name]) for name in PLACES if name in members},
        {name: members[name] for name in KEYS if name in members} | _label_settings(members),
    )


def _are_texts(members: dict[str, object]) -> bool:
    return all(isinstance(value, str) for name, value in members.items() if name not in LABELS)


def _label_settings(members: dict[str, object]) -> dict[str, object]:
    """Return how an entry's labels are read: by one of the two ways, which then takes the place of the flags'."""
    if "label_map" in members and "label_threshold" in members:
        got = f"both for {members['path']}"
        raise data_error("dataset", "an entry may have label_map or label_threshold", got, "Leave one out.")
    if "label_map" in members:
        given = members["label_map"]
        pairs = [f"{value}={meaning}" for value, meaning in given.items()] if isinstance(given, dict) else []
        place = f"dataset: label_map of {members['path']}"
        items = pairs or [str(item) for item in _listed(given)]
        return {"label_map": label_meanings(place, items), "label_threshold": ()}
    if "label_threshold" in members:
        place = f"dataset: label_threshold of {members['path']}"
        return {"label_map": None, "label_threshold": check_threshold(place, _listed(members["label_threshold"]))}
    return {}


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]
