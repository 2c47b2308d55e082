"""Read an entry of --dataset that is a mapping: a path with settings of its own."""

from dataclasses import dataclass, field
from pathlib import Path

from openkto.data.json_files import parse_json
from openkto.data.problems import data_error, shorten

# What an entry may set of how its records are read, and of where they lie; each by the name of its flag.
KEYS = ("input_key", "output_key", "label_key", "weight_key")
PLACES = ("split", "config", "revision")


@dataclass(frozen=True)
class Entry:
    """A path, glob, folder or Hub name, and what holds for it only."""

    path: str
    place: dict[str, str] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)


def read_entry(item: str | Path) -> Entry:
    """Return an entry; a mapping stands as its JSON text, {"path": ..., "label_key": ...}.

    Raises:
        DataError: the mapping has other members than are known, or values that are no texts.
    """
    text = str(item)
    if not text.startswith("{"):
        return Entry(text)
    try:
        members = parse_json(text)
    except (ValueError, RecursionError):
        members = None
    known = ("path", *PLACES, *KEYS)
    is_good = isinstance(members, dict) and "path" in members and members.keys() <= set(known)
    if not is_good or not isinstance(members, dict) or not all(isinstance(v, str) for v in members.values()):
        rule = f"an entry must be a path, or a mapping of path and any of {', '.join(known[1:])} to texts"
        raise data_error("dataset", rule, shorten(text, 120), "Correct the entry.")
    return Entry(
        members["path"],
        {name: members[name] for name in PLACES if name in members},
        {name: members[name] for name in KEYS if name in members},
    )
