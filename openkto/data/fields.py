"""Find a field of a record by its path: names and numbers with dots between, such as scores.0.value."""

import re

from openkto.data.json_files import parse_json

# What tells the members of a list apart, where a step is a name.
NAMES = ("name", "key", "from_name")


def find(record: object, path: str) -> list[object]:
    """Return the values at a path: none where nothing is there, several where a `*` stands for all members.

    A step is a member's name, or in a list its number or the `name` of the member; a name may hold dots itself. Text
    that stands in the way is read as JSON, as tools write it into cells of a CSV file.
    """
    if isinstance(record, dict) and path in record:
        return [record[path]]
    return _walk(record, path.split("."))


def top_name(record: dict[str, object], path: str) -> str:
    """Return the record's own field that a path begins with."""
    steps = path.split(".")
    names = (".".join(steps[:count]) for count in range(len(steps), 0, -1))
    return next((name for name in names if name in record), steps[0])


def is_missing(value: object) -> bool:
    """Return whether a value is null, or what pandas and numpy write in its place: NaN, NaT, NA."""
    if value is None or isinstance(value, (str, list, dict)):
        return value is None
    try:
        return bool(value != value)
    except (TypeError, ArithmeticError):  # pandas' NA is neither itself nor another; a decimal may be no number
        return True


def is_empty(value: object) -> bool:
    """Return whether a value says nothing: a missing one, an empty text, list or object."""
    return is_missing(value) or (isinstance(value, (str, list, dict)) and not value)


def words_of(name: str) -> list[str]:
    """Return the words of a field's name, thumbsUp and thumbs_up alike."""
    return [part.lower() for part in re.findall(r"[A-Z]?[^\W_A-Z]+|[A-Z]+", name)]


def _walk(value: object, steps: list[str]) -> list[object]:
    if not steps:
        return [value]
    if isinstance(value, str) and value.lstrip().startswith(("{", "[")):
        try:
            value = parse_json(value)
        except (ValueError, RecursionError):
            return []
    if steps[0] == "*" and isinstance(value, (dict, list)):
        members = list(value.values()) if isinstance(value, dict) else value
        return [found for member in members for found in _walk(member, steps[1:])]
    if isinstance(value, dict):
        for count in range(len(steps), 0, -1):
            name = ".".join(steps[:count])
            if name in value:
                return _walk(value[name], steps[count:])
    if isinstance(value, list):
        return [found for member in _members(value, steps[0]) for found in _walk(member, steps[1:])]
    return []


def _members(values: list[object], step: str) -> list[object]:
    """Return the members of a list that a step names, by number or by name."""
    if step.removeprefix("-").isdecimal():
        index = int(step)
        return values[index : index + 1 or None] if -len(values) <= index < len(values) else []
    return [value for value in values if isinstance(value, dict) and any(value.get(name) == step for name in NAMES)]
