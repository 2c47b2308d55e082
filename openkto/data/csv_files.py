"""Read tables of text: cells between commas, semicolons, tabs or bars, as spreadsheets and databases write them."""

import csv
import re
from collections.abc import Iterator

from openkto.data.json_files import Records
from openkto.data.problems import FIX_ROW, OR_SKIP, BadRow, Findings, data_error, shorten
from openkto.data.text_files import DataFile, text_lines

SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
ESCAPED_QUOTE = '\\"'


def read_csv(file: DataFile, findings: Findings) -> Records:
    """Yield one record of text cells a line; the first line names the columns and tells what separates them."""
    csv.field_size_limit(2**31 - 1)
    lines = _Lines(file)
    separator = _separator(file, lines, findings)
    reader = csv.reader(lines, strict=True, delimiter=separator)
    header: list[str] | None = None
    while True:
        place = f"{file.name}:{lines.number + 1}"
        lines.taken.clear()
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            cure = "Repair the quotes from this line on."
            if any(ESCAPED_QUOTE in line for line in lines.taken):
                cure = 'Write a quote inside quotes twice (""), not with a backslash, in the whole file.'
            raise data_error(place, f"must be CSV ({error})", "a line that is not", cure) from None
        # A blank line, or one of empty cells, as spreadsheets leave them at the end.
        if not cells or (header is not None and not any(cells)):
            continue
        if header is None:
            header = _names(place, cells)
            if "" in header:
                findings.add(file.name, "a column without a name is left out")
        elif len(cells) != len(header):
            rule = f"must have as many cells as the first line, {len(header)}"
            is_escaped = any(ESCAPED_QUOTE in line for line in lines.taken)
            cure = f'Write a quote inside quotes twice (""), not with a backslash{OR_SKIP}' if is_escaped else FIX_ROW
            yield place, BadRow(place, "wrong number of cells", rule, f"{len(cells)}: {shorten(cells)}", cure)
        else:
            yield place, {name: cell for name, cell in zip(header, cells, strict=True) if name}


class _Lines:
    """The text of a file line by line, with the number of the last one and those since `taken` was cleared."""

    def __init__(self, file: DataFile) -> None:
        self._lines = text_lines(file)
        self._ahead: list[tuple[int, str]] = []
        self.number = 0
        self.taken: list[str] = []

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        self.number, line = self._ahead.pop() if self._ahead else next(self._lines)
        self.taken.append(line)
        return line

    def peek(self) -> str:
        """Return the next line that is not blank, without taking it; nothing at the end."""
        for number, line in self._lines:
            if line.strip():
                self._ahead.append((number, line))
                return line
            self.number = number
        return ""


def _separator(file: DataFile, lines: _Lines, findings: Findings) -> str:
    """Return what separates the names in the first line; Excel may say it in a line of its own, as sep=;."""
    first = lines.peek()
    if "\r" in first.rstrip("\r\n") and not first.endswith("\n"):
        cure = "Save it with line feeds, as tr '\\r' '\\n' does."
        raise data_error(f"{file.name}:1", "its lines must end with a line feed", "line ends of old Macs (\\r)", cure)
    said = re.fullmatch(r"sep=(.)\s*", first)
    if said is not None:
        next(lines)
        return said[1]
    usual = "\t" if file.container == ".tsv" else ","
    counts = {mark: len(next(csv.reader([first], delimiter=mark), [])) for mark in (usual, *SEPARATORS)}
    found = max(counts, key=lambda mark: counts[mark])
    if found != usual:
        findings.add(file.name, f"its cells are separated by {SEPARATORS[found]}")
    return found


def _names(place: str, cells: list[str]) -> list[str]:
    names = [cell.strip() for cell in cells]
    named = [name for name in names if name]
    if not named or len(set(named)) < len(named):
        raise data_error(place, "the first line must name each column once", shorten(cells), "Name the columns.")
    return names
