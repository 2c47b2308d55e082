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
from typing import Any, Literal, Protocol

import numpy as np
import pyarrow as pa

from openkto.data.cache import REPORT_FILE, ROWS_FILE
from openkto.data.holdout import DIGEST_BYTES, prompt_digest
from openkto.data.numbered import NumberedRows, characters_of
from openkto.data.problems import BadRow, Findings, data_error, shorten
from openkto.data.report import bad_rows, some_rows
from openkto.data.row import Row, RowSettings
from openkto.data.sources import Source
from openkto.data.tokenize import RowTokenizer, TokenizedRow
from openkto.errors import DataError
from openkto.process.limits import is_panic

logger = logging.getLogger(__name__)

BATCH_RECORDS = 1000
BATCH_CHARACTERS = 20_000_000  # of long rows fewer are in memory together
FIRST_LINE_SECONDS = 10.0  # until it is said how far it is; each further line takes twice as long
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
        ("prompt_digest", pa.binary(DIGEST_BYTES)),
    ]
)


@dataclass
class Prepared:
    """The counts of a preparation, before truncation and mixing; JSON-able."""

    rows_read: int = 0
    rows_of_sources: list[int] = field(default_factory=list)  # rows written, a number for each source
    skipped: dict[str, int] = field(default_factory=dict)  # records left out, by kind
    first_skipped: dict[str, str] = field(default_factory=dict)  # the first of each kind
    unlabelled: dict[str, int] = field(default_factory=dict)  # rows left out that are not bad ones, by reason
    findings: list[str] = field(default_factory=list)  # what was recognised, by file
    unread: list[str] = field(default_factory=list)  # the fields with values that nothing reads
    merged: int = 0
    template_differs: int = 0
    special_markup: int = 0
    notes: dict[str, int] = field(default_factory=dict)  # rows, by what was special about them


def load_prepared(folder: Path) -> Prepared:
    """Return the counts that a complete preparation left in its folder."""
    return Prepared(**json.loads((folder / REPORT_FILE).read_text(encoding="utf-8")))


class RowWatch(Protocol):
    """Looks at the rows as they pass, in the order in which they are written, and at the bad ones that are skipped."""

    def see(self, rows: list[tuple[int, Row, TokenizedRow]], written: pa.RecordBatch) -> None:
        """Look at rows with their numbers, and at what is written of them."""

    def see_bad(self, bad: BadRow) -> None:
        """Look at a bad row."""


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
        watch: RowWatch | None = None,
    ) -> None:
        self._tokenizer = RowTokenizer(tokenizer, end_token_ids=end_token_ids, template_date=settings.template_date)
        self._settings = settings
        self._max_samples = max_samples
        self._on_bad_rows = on_bad_rows
        self._watch = watch
        self._counts = Prepared()
        self._skipped: Counter[str] = Counter()
        self._notes: Counter[str] = Counter()
        self._unlabelled: Counter[str] = Counter()
        self._findings = Findings()
        self._started, self._next_line = time.monotonic(), FIRST_LINE_SECONDS

    def write(self, sources: list[Source], folder: Path) -> None:
        """Write the rows' file and the report into a folder; raises DataError for what is wrong with the data."""
        first_row = 0
        with pa.OSFile(str(folder / ROWS_FILE), "wb") as sink, pa.ipc.new_stream(sink, SCHEMA) as writer:
            for source in sources:
                is_last = source is sources[-1]
                first_row = self._write_source(source, first_row, writer, is_last)
        rows = sum(self._counts.rows_of_sources)
        if rows == 0:
            raise self._nothing_left(", ".join(source.name for source in sources))
        self._counts.skipped, self._counts.notes = dict(self._skipped), dict(self._notes)
        self._counts.unlabelled = dict(self._unlabelled)
        self._counts.findings = self._findings.lines()
        (folder / REPORT_FILE).write_text(json.dumps(asdict(self._counts)), encoding="utf-8")
        seconds = time.monotonic() - self._started
        logger.info("tokenised %s in %.1f s (%.0f rows/s)", some_rows(rows), seconds, rows / max(seconds, 1e-9))

    def _nothing_left(self, name: str) -> DataError:
        kinds = [bad_rows(count, kind) for kind, count in self._skipped.items()]
        kinds += [f"{some_rows(count)} {reason}" for reason, count in self._unlabelled.items()]
        first = next(iter(self._counts.first_skipped.values()), "")
        cure = f"The first bad row: {first}" if first else "Name the field with the labels with --label_key."
        return data_error(name, "at least one row must be left", ", ".join(kinds), cure)

    def _write_source(self, source: Source, first_row: int, writer: Any, is_last: bool) -> int:
        """Write a source's rows; return the number of the next source's first row."""
        template = self._tokenizer.template
        source_rows = NumberedRows(source, self._settings, self._max_samples, self._findings, template, first_row)
        reader = source_rows.reader
        batch: list[tuple[int, list[Row]]] = []
        written = characters = 0
        for number, rows in source_rows:
            if isinstance(rows, BadRow):
                # A row before this one may still turn out bad when it is tokenised, and the first is to be named.
                if self._on_bad_rows == "error":
                    self._write_batch(batch, writer)
                self._skip(rows)
                continue
            # The rows of a pair stay together; each turn of a dialogue is good or bad by itself.
            batch += [(number, group) for group in ([rows] if reader.is_pairs else [[row] for row in rows])]
            characters += sum(characters_of(row.prompt) + characters_of(row.completion) for row in rows)
            if len(batch) >= BATCH_RECORDS or characters > BATCH_CHARACTERS:
                written += self._write_batch(batch, writer)
                batch, characters = [], 0
        written += self._write_batch(batch, writer)
        self._counts.rows_read += source_rows.next_row - first_row
        self._counts.rows_of_sources.append(written)
        self._unlabelled += reader.left_out
        if reader.note:
            self._findings.add(source.name, reader.note)
        self._counts.unread += [name for name in reader.unread if name not in self._counts.unread]
        if source_rows.has_more() if is_last else source_rows.skip_rest() > 0:
            self._findings.add(source.name, f"only its first {self._max_samples} records are read (--max_samples)")
        return source_rows.next_row

    def _write_batch(self, batch: list[tuple[int, list[Row]]], writer: Any) -> int:
        tokenized = iter(self._tokenize([row for _, group in batch for row in group]))
        rows: list[tuple[int, Row, TokenizedRow]] = []
        for number, group in batch:
            results = list(islice(tokenized, len(group)))
            bad = next((result for result in results if isinstance(result, BadRow)), None)
            if bad is not None:
                self._skip(bad)
                continue
            good = [result for result in results if isinstance(result, TokenizedRow)]
            rows += [(number + row.offset, row, tokens) for row, tokens in zip(group, good, strict=True)]
        if rows:
            kept = [tokens for _, _, tokens in rows]
            self._counts.merged += sum(row.is_merged for row in kept)
            self._counts.template_differs += sum(row.template_differs for row in kept)
            self._counts.special_markup += sum(row.has_special_markup for row in kept)
            self._notes.update(note for row in kept for note in row.notes)
            written = _record_batch(rows)
            writer.write_batch(written)
            if self._watch is not None:
                self._watch.see(rows, written)
            self._say_progress(rows[-1][0])
        return len(rows)

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
        if self._watch is not None:
            self._watch.see_bad(bad)
        self._skipped[bad.kind] += 1
        self._counts.first_skipped.setdefault(bad.kind, bad.when_skipped())

    def _say_progress(self, number: int) -> None:
        seconds = time.monotonic() - self._started
        if seconds > self._next_line:
            self._next_line = 2 * seconds
            logger.info("tokenising: at row %d (%.0f rows/s)", number, (number + 1) / seconds)


def _record_batch(rows: list[tuple[int, Row, TokenizedRow]]) -> pa.RecordBatch:
    columns = [
        [number for number, _, _ in rows],
        [tokens.prompt_ids for _, _, tokens in rows],
        [tokens.completion_ids for _, _, tokens in rows],
        [tokens.completion_mask for _, _, tokens in rows],
        [row.label for _, row, _ in rows],
        [row.weight for _, row, _ in rows],
        [_digest(tokens.prompt_ids) for _, _, tokens in rows],
        [_digest(tokens.completion_ids) for _, _, tokens in rows],
        [prompt_digest(row.prompt) for _, row, _ in rows],
    ]
    arrays = [pa.array(values, type=column.type) for values, column in zip(columns, SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def _digest(ids: list[int]) -> bytes:
    return hashlib.blake2b(np.asarray(ids, dtype="<i4").tobytes(), digest_size=16).digest()
