"""Number a source's rows, in one way for training and for messages that name a row."""

from collections import deque
from collections.abc import Iterator
from itertools import islice

from openkto.data.problems import BadRow, Findings
from openkto.data.row import Row, RowSettings
from openkto.data.rows import RowReader
from openkto.data.sources import Source
from openkto.data.template import ChatTemplate
from openkto.errors import DataError
from openkto.process.limits import ROW_CHARACTERS

Record = tuple[str, str, object]  # of which file, where, what

AHEAD_RECORDS = 1000
AHEAD_CHARACTERS = 20_000_000  # of long records fewer are in memory together


class NumberedRows:
    """Iterates over a source once: for each record its first row's number, with its rows or what is wrong with it.

    Args:
        max_samples: records read, from the source's start.
        template: the tokenizer's, which texts are wrapped in; None takes them as they are.
        findings: is told what is recognised of the files.
        first_row: the number of the source's first row.
    """

    def __init__(
        self,
        source: Source,
        settings: RowSettings,
        max_samples: int,
        findings: Findings,
        template: ChatTemplate | None = None,
        first_row: int = 0,
    ) -> None:
        self._records = source.records(findings)
        self._taken = islice(self._records, max_samples)
        self._ahead = _look_ahead(self._taken)
        self.reader = RowReader(settings.of_source(source.settings), template, [value for _, _, value in self._ahead])
        self.next_row = first_row  # the number that the next record's first row gets

    def __iter__(self) -> Iterator[tuple[int, list[Row] | BadRow]]:
        for file, place, value in _in_order(self._ahead, self._taken):
            rows: list[Row] | BadRow
            try:
                rows = self.reader.read(place, file, value)
                for row in rows:
                    check_size(row)
            except BadRow as bad:
                rows = bad
            number, self.next_row = self.next_row, self.next_row + self.reader.rows_of(value)
            yield number, rows

    def has_more(self) -> bool:
        """Take a record beyond max_samples, and return whether there is one; it may be broken."""
        try:
            return next(self._records, None) is not None
        except DataError:
            return True

    def skip_rest(self) -> int:
        """Count the rows beyond max_samples, too: the next source's numbers follow the full size of this one."""
        rest = sum(self.reader.rows_of(value) for _, _, value in self._records)
        self.next_row += rest
        return rest


def _look_ahead(records: Iterator[Record]) -> deque[Record]:
    """Take the records by whose fields a source's format is told, but no more of them than memory takes."""
    ahead: deque[Record] = deque()
    characters = 0
    for record in islice(records, AHEAD_RECORDS):
        ahead.append(record)
        characters += characters_of(record[2])
        if characters > AHEAD_CHARACTERS:
            break
    return ahead


def _in_order(ahead: deque[Record], records: Iterator[Record]) -> Iterator[Record]:
    while ahead:
        yield ahead.popleft()
    yield from records


def check_size(row: Row) -> None:
    """Raise BadRow where a row's texts would fill the memory with tokens."""
    characters = characters_of(row.prompt) + characters_of(row.completion)
    if characters > ROW_CHARACTERS:
        rule = f"prompt and completion must have at most {ROW_CHARACTERS:,} characters, more than any model takes"
        raise BadRow(row.place, "too large", rule, f"{characters:,}")


def characters_of(value: object) -> int:
    """Return the characters of all texts in a value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(characters_of, value.values()))
    return sum(map(characters_of, value)) if isinstance(value, list) else 0
