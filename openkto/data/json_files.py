"""Read JSON as people have it: an object a line, one array, objects over several lines, a list under a name.

The text is read as far as it is needed, so a file of a million rows never sits in memory, unless it is one line.
"""

import json
import re
from collections.abc import Iterator
from itertools import chain, islice

from openkto.data.problems import OR_SKIP, BadRow, Findings, data_error, shorten
from openkto.data.text_files import DataFile, text_lines

Records = Iterator[tuple[str, object]]

HEAD_LINES = 100
# The start of an object that holds the rows in a list, with nothing but plain values before it.
LIST_NAMES = ("data", "rows", "records", "examples", "instances", "samples")
_PLAIN = r'(?:"[^"\\\n]*"|-?[\d.eE+-]+|true|false|null)'
# What the Hub's dataset viewer answers: the columns, then the rows, each in an object with its number.
_VIEWER = re.compile(r'\s*\{\s*"features"\s*:\s*(?=\[)')
_WRAPPER = re.compile(
    rf'\s*\{{\s*(?:"[^"\\\n]*"\s*:\s*{_PLAIN}\s*,\s*)*"({"|".join(LIST_NAMES)})"\s*:\s*(?=\[\s*[{{\]])'
)
REPAIR = "Repair it, or write one object a line into a .jsonl file."


def read_json(file: DataFile, findings: Findings) -> Records:
    """Yield the records of a file and their lines, whichever of the forms it has; its first line tells."""
    lines = text_lines(file)
    head = _head(lines)
    first = head[-1][1].strip() if head else ""
    is_open = first.startswith("{") and first.endswith(("{", "[", ","))
    if is_open:
        head += islice(lines, HEAD_LINES)
    wrapper = _WRAPPER.match("".join(line for _, line in head))
    text = _Text(file, head, lines)
    if first.startswith("["):
        yield from _array(text)
        text.expect_end("the array")
    elif wrapper is not None:
        findings.add(file.name, f"the rows are the list under {wrapper[1]}")
        text.advance(wrapper.end())
        yield from _array(text)
        text.expect_rest_of_object()
    elif (viewer := _VIEWER.match("".join(line for _, line in head))) is not None:
        findings.add(file.name, "the rows are those that the Hub's dataset viewer shows")
        text.advance(viewer.end())
        yield from _viewer_rows(text)
    elif is_open:
        findings.add(file.name, "its objects go over several lines")
        while text.peek():
            place = text.place()
            yield place, text.value("an object")
    else:
        for number, line in chain(head, lines):
            if line.strip():
                yield _line_record(f"{file.name}:{number}", line.rstrip("\r\n"))


def parse_json(text: str) -> object:
    """Return the value of a JSON text; raises ValueError or RecursionError, also for a key given twice."""
    return json.loads(text, object_pairs_hook=_unique_keys)


class _Text:
    """The text of a file from a position on, which grows by lines where a value is not yet whole."""

    def __init__(self, file: DataFile, head: list[tuple[int, str]], lines: Iterator[tuple[int, str]]) -> None:
        self._file, self._lines = file, lines
        self._text = "".join(line for _, line in head)
        self._line = head[0][0] if head else 1
        self._position = 0

    def place(self) -> str:
        return f"{self._file.name}:{self._line}"

    def advance(self, position: int) -> None:
        """Move to a position, and drop the text before it."""
        self._line += self._text.count("\n", self._position, position)
        self._position = position
        if self._position > len(self._text) // 2:
            self._text, self._position = self._text[self._position :], 0

    def peek(self) -> str:
        """Skip blanks; return the next character, or nothing at the end."""
        while True:
            position = self._position
            while self._text[position : position + 1] in {" ", "\t", "\n", "\r"}:
                position += 1
            self.advance(position)
            if self._position < len(self._text) or not self._grow():
                return self._text[self._position : self._position + 1]

    def take(self) -> str:
        """Return the next character that is not blank, and move past it."""
        character = self.peek()
        self.advance(self._position + len(character))
        return character

    def value(self, what: str) -> object:
        """Return the next value; raises DataError, with its line, for one that is none."""
        self.peek()
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._position)
            except (ValueError, RecursionError) as error:
                at = error.pos if isinstance(error, json.JSONDecodeError) else self._position
                if isinstance(error, json.JSONDecodeError) and at >= len(self._text.rstrip()) and self._grow():
                    continue
                line = self._line + self._text.count("\n", self._position, at)
                got = shorten(self._text[self._position : self._position + 60])
                raise data_error(
                    f"{self._file.name}:{line}", f"{what} must be JSON ({_reason(error)})", got, REPAIR
                ) from None
            self.advance(end)
            return value

    def expect_end(self, what: str) -> None:
        if self.peek():
            got = shorten(self._text[self._position :].strip()[:60])
            raise data_error(self.place(), f"nothing may follow {what}", got, REPAIR)

    def expect_rest_of_object(self) -> None:
        """Read what follows the list of rows in its object: other members, and its end."""
        while (character := self.take()) == ",":
            self.value("a name")
            if self.take() != ":":
                break
            self.value("a member")
        if character != "}":
            got = shorten(character) if character else "the end of the file"
            raise data_error(self.place(), "a comma or } must follow the list of rows", got, REPAIR)
        self.expect_end("the object that holds the rows")

    def rest(self) -> str:
        return shorten(self._text[self._position :][:20]) if self.peek() else "the end of the file"

    def _grow(self) -> bool:
        """Read about as much as is there already, so that a long value is not tried too often; False at the end."""
        wanted = len(self._text) - self._position
        parts, length = [], 0
        for _, line in self._lines:
            parts.append(line)
            length += len(line)
            if length >= wanted:
                break
        self._text += "".join(parts)
        return bool(parts)


def _array(text: _Text) -> Records:
    assert text.take() == "[", "the array's start has been seen"
    if text.peek() == "]":
        text.take()
        return
    while True:
        text.peek()
        place = text.place()
        yield place, text.value("an element of the array")
        if text.peek() not in (",", "]"):
            raise data_error(text.place(), "a comma or ] must follow an element of the array", text.rest(), REPAIR)
        if text.take() == "]":
            return


def _viewer_rows(text: _Text) -> Records:
    """Yield the rows of the dataset viewer's answer; one whose cells it has cut is a bad row."""
    text.value("the columns")
    if text.take() != "," or text.value("a name") != "rows" or text.take() != ":" or text.peek() != "[":
        raise data_error(text.place(), "the rows must follow the columns", text.rest(), REPAIR)
    for place, member in _array(text):
        if not isinstance(member, dict) or "row" not in member:
            yield place, BadRow(place, "no row", "a member of rows must hold a row", shorten(member))
        elif member.get("truncated_cells"):
            got = f"{shorten(member['truncated_cells'])} cut short by the viewer"
            yield place, BadRow(place, "cut cells", "cells must be whole", got, "Name the dataset by its Hub name.")
        else:
            yield place, member["row"]
    text.expect_rest_of_object()


def _head(lines: Iterator[tuple[int, str]]) -> list[tuple[int, str]]:
    """Return the lines up to the first that is not blank."""
    head = []
    for number, line in lines:
        head.append((number, line))
        if line.strip():
            break
    return head


def _line_record(place: str, text: str) -> tuple[str, object]:
    try:
        return place, parse_json(text)
    except (ValueError, RecursionError) as error:
        rule = f"must be one JSON object ({_reason(error)})"
        if text.lstrip().startswith("{'"):
            cure = "This is Python's notation: write rows with json.dumps" + OR_SKIP
            return place, BadRow(place, "broken JSON", rule, shorten(text), cure)
        if isinstance(error, json.JSONDecodeError) and text[error.pos : error.pos + 1] == "{":
            cure = "Write one object per line, as jq -c . FILE does" + OR_SKIP
            return place, BadRow(place, "broken JSON", rule, shorten(text), cure)
        return place, BadRow(place, "broken JSON", rule, shorten(text))


class _DuplicateKey(ValueError):
    pass


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    record = dict(pairs)
    if len(record) < len(pairs):
        keys = [key for key, _ in pairs]
        raise _DuplicateKey(f"the key {shorten(next(key for key in keys if keys.count(key) > 1))} stands twice")
    return record


_DECODER = json.JSONDecoder(object_pairs_hook=_unique_keys)


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at column {error.colno}"
    if isinstance(error, _DuplicateKey):
        return str(error)
    return "a number with too many digits"
