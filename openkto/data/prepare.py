"""Stream records through reading, rendering and tokenising into an Arrow file, a batch at a time.

A million rows never sit in memory: what is kept is one batch and the counts.
"""

import hashlib
import json
import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from openkto.data.cache import REPORT_FILE, ROWS_FILE
from openkto.data.problems import BadRow, data_error, shorten
from openkto.data.row import Row, RowSettings
from openkto.data.rows import RowReader
from openkto.data.sources import Source
from openkto.data.tokenize import RowTokenizer, TokenizedRow
from openkto.limits import ROW_CHARACTERS, is_panic

logger = logging.getLogger(__name__)

BATCH_RECORDS = 1000
BATCH_CHARACTERS = 20_000_000  # of long rows fewer are in memory together
SECONDS_BETWEEN_LINES = 10.0
SCHEMA = pa.schema(
    [
        ("row", pa.int64()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("completion_ids", pa.list_(pa.int32())),
        ("completion_mask", pa.list_(pa.bool_())),
        ("label", pa.bool_()),
        ("weight", pa.float64()),
        ("prompt_key", pa.binary(16)),
        ("completion_key", pa.binary(16)),
    ]
)


@dataclass
class Prepared:
    """The counts of a preparation, before truncation and mixing; JSON-able."""

    rows_read: int = 0
    rows_of_sources: list[int] = field(default_factory=list)  # rows written, a number for each source
    skipped: dict[str, int] = field(default_factory=dict)  # records left out, by kind
    first_skipped: dict[str, str] = field(default_factory=dict)  # the first of each kind
    merged: int = 0
    template_differs: int = 0
    special_markup: int = 0
    notes: dict[str, int] = field(default_factory=dict)  # rows, by what was special about them
    unread: list[str] = field(default_factory=list)  # the fields with values that nothing reads


def load_prepared(folder: Path) -> Prepared:
    """Return the counts that a complete preparation left in its folder."""
    return Prepared(**json.loads((folder / REPORT_FILE).read_text(encoding="utf-8")))


class Preparation:
    """One pass over all sources."""

    def __init__(
        self,
        tokenizer: Any,
        settings: RowSettings,
        *,
        max_samples: int,
        on_bad_rows: Literal["error", "skip"],
        end_token_ids: Sequence[int] = (),
        template_date: str | None = None,
    ) -> None:
        self._tokenizer = RowTokenizer(tokenizer, end_token_ids=end_token_ids, template_date=template_date)
        self._settings = settings
        self._max_samples = max_samples
        self._on_bad_rows = on_bad_rows
        self._counts = Prepared()
        self._skipped: Counter[str] = Counter()
        self._notes: Counter[str] = Counter()
        self._started = self._last_line = time.monotonic()

    def write(self, sources: list[Source], folder: Path) -> None:
        """Write the rows' file and the report into a folder; raises DataError for what is wrong with the data."""
        first_row = 0
        with pa.OSFile(str(folder / ROWS_FILE), "wb") as sink, pa.ipc.new_stream(sink, SCHEMA) as writer:
            for source in sources:
                is_last = source is sources[-1]
                first_row += self._write_source(source, first_row, writer, is_last)
        rows = sum(self._counts.rows_of_sources)
        if rows == 0:
            kinds = ", ".join(f"{count} {kind}" for kind, count in self._skipped.items())
            first = next(iter(self._counts.first_skipped.values()))
            raise data_error(
                ", ".join(source.name for source in sources),
                "at least one row must be left",
                f"bad rows alone ({kinds})",
                f"The first: {first}",
            )
        self._counts.skipped, self._counts.notes = dict(self._skipped), dict(self._notes)
        (folder / REPORT_FILE).write_text(json.dumps(asdict(self._counts)), encoding="utf-8")
        seconds = time.monotonic() - self._started
        logger.info("tokenised %d rows in %.1f s (%.0f rows/s)", rows, seconds, rows / max(seconds, 1e-9))

    def _write_source(self, source: Source, first_row: int, writer: Any, is_last: bool) -> int:
        """Write a source's rows; return how many row numbers it takes, those beyond max_samples included."""
        template = self._tokenizer.template
        reader = RowReader(self._settings, template.is_rendered if template.exists else None)
        records = ((part.name, place, value) for part in source.parts for place, value in part.records())
        batch: list[tuple[int, list[Row]]] = []
        written = characters = 0
        number = -1
        for number, (file, place, value) in enumerate(islice(records, self._max_samples)):
            try:
                rows = reader.read(place, file, value)
                characters += sum(map(check_size, rows))
                batch.append((number, rows))
            except BadRow as bad:
                # A row before this one may still turn out bad when it is tokenised, and the first is to be named.
                if self._on_bad_rows == "error":
                    self._write_batch(batch, reader.rows_per_record, first_row, writer)
                self._skip(bad)
            if len(batch) == BATCH_RECORDS or characters > BATCH_CHARACTERS:
                written += self._write_batch(batch, reader.rows_per_record, first_row, writer)
                batch, characters = [], 0
        written += self._write_batch(batch, reader.rows_per_record, first_row, writer)
        self._counts.rows_read += (number + 1) * reader.rows_per_record
        self._counts.rows_of_sources.append(written)
        self._counts.unread += [name for name in reader.unread if name not in self._counts.unread]
        # The next source's row numbers follow this source's full size.
        beyond = 0 if is_last else sum(1 for _ in records)
        return (number + 1 + beyond) * reader.rows_per_record

    def _write_batch(
        self, batch: list[tuple[int, list[Row]]], rows_per_record: int, first_row: int, writer: Any
    ) -> int:
        rows = self._tokenize([row for _, record in batch for row in record])
        numbers: list[int] = []
        labels: list[bool] = []
        weights: list[float] = []
        kept: list[TokenizedRow] = []
        for index, (number, record) in enumerate(batch):
            tokenized = rows[index * rows_per_record : (index + 1) * rows_per_record]
            good = [row for row in tokenized if isinstance(row, TokenizedRow)]
            if len(good) < len(tokenized):
                self._skip(next(row for row in tokenized if isinstance(row, BadRow)))
                continue
            numbers += range(first_row + number * rows_per_record, first_row + (number + 1) * rows_per_record)
            labels += [row.label for row in record]
            weights += [row.weight for row in record]
            kept += good
        if kept:
            self._counts.merged += sum(row.is_merged for row in kept)
            self._counts.template_differs += sum(row.template_differs for row in kept)
            self._counts.special_markup += sum(row.has_special_markup for row in kept)
            self._notes.update(note for row in kept for note in row.notes)
            writer.write_batch(_record_batch(numbers, labels, weights, kept))
        self._say_progress(numbers)
        return len(kept)

    def _tokenize(self, rows: list[Row]) -> list[TokenizedRow | BadRow]:
        """Return each row's tokens, or what is wrong with it, also where the tokenizer's library panics."""
        try:
            return self._tokenizer.tokenize(rows)
        except BaseException as error:
            if not is_panic(error):
                raise
            if len(rows) > 1:
                return [result for row in rows for result in self._tokenize([row])]
            rule = "the text must be one that the tokenizer's library can split"
            return [BadRow(rows[0].place, "tokenizer", rule, f"a panic in it: {shorten(str(error), 120)}")]

    def _skip(self, bad: BadRow) -> None:
        if self._on_bad_rows == "error":
            raise bad
        self._skipped[bad.kind] += 1
        self._counts.first_skipped.setdefault(bad.kind, str(bad))

    def _say_progress(self, numbers: list[int]) -> None:
        now = time.monotonic()
        if numbers and now - self._last_line > SECONDS_BETWEEN_LINES:
            self._last_line = now
            rate = (numbers[-1] + 1) / (now - self._started)
            logger.info("tokenising: at row %d (%.0f rows/s)", numbers[-1], rate)


def check_size(row: Row) -> int:
    """Return the characters of a row's texts; raises BadRow where they would fill the memory with tokens."""
    characters = _characters(row.prompt) + _characters(row.completion)
    if characters > ROW_CHARACTERS:
        rule = f"prompt and completion must have at most {ROW_CHARACTERS:,} characters, more than any model takes"
        raise BadRow(row.place, "too large", rule, f"{characters:,}")
    return characters


def _characters(value: object) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_characters, value.values()))
    return sum(map(_characters, value)) if isinstance(value, list) else 0


def _record_batch(
    numbers: list[int], labels: list[bool], weights: list[float], rows: list[TokenizedRow]
) -> pa.RecordBatch:
    columns = [
        numbers,
        [row.prompt_ids for row in rows],
        [row.completion_ids for row in rows],
        [row.completion_mask for row in rows],
        labels,
        weights,
        [_digest(row.prompt_ids) for row in rows],
        [_digest(row.completion_ids) for row in rows],
    ]
    arrays = [pa.array(values, type=column.type) for values, column in zip(columns, SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def _digest(ids: list[int]) -> bytes:
    return hashlib.blake2b(np.asarray(ids, dtype="<i4").tobytes(), digest_size=16).digest()
