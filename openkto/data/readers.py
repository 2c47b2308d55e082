"""Read data files as records with their place: one function a container, each a generator.

A reader yields (place, value). The value is the decoded record, or a `BadRow` where only this record is unreadable.
What makes the rest of the file unreadable (encoding, a broken array or container) is raised as a DataError.
"""

import csv
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from openkto.data.problems import BadRow, data_error, shorten

Records = Iterator[tuple[str, object]]

BATCH_ROWS = 1000
UTF16_AND_32_BOMS = (b"\xff\xfe", b"\xfe\xff")
# What pyarrow raises on damaged bytes; its own exceptions derive from several of Python's.
ARROW_ERRORS = (pa.ArrowException, OSError, ValueError, KeyError, NotImplementedError, OverflowError, MemoryError)


def read_json_lines(path: Path) -> Records:
    """Yield one record a line; blank lines are not rows."""
    for number, line in _text_lines(path):
        text = line.rstrip("\r\n")
        if text.strip():
            place = f"{path}:{number}"
            try:
                yield place, parse_json(text)
            except (ValueError, RecursionError) as error:
                yield place, BadRow(place, "broken JSON", f"must be one JSON object ({_reason(error)})", shorten(text))


def read_json(path: Path) -> Records:
    """Yield the elements of one array, or the lines of a file of JSON lines."""
    with path.open("rb") as file:
        head = file.read(4096)
    if not head.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
        yield from read_json_lines(path)
        return
    text = "".join(line for _, line in _text_lines(path))
    cure = "Repair the array, or write one object a line into a .jsonl file."
    position = text.index("[") + 1
    line = 1 + text.count("\n", 0, position)
    is_first = True
    while True:
        start = _skip_space(text, position)
        line += text.count("\n", position, start)
        if is_first and text[start : start + 1] == "]":
            position = start + 1
            break
        try:
            value, position = _DECODER.raw_decode(text, start)
        except (ValueError, RecursionError) as error:
            if isinstance(error, json.JSONDecodeError):
                line += text.count("\n", start, error.pos)
            raise data_error(
                f"{path}:{line}",
                f"an element of the array must be JSON ({_reason(error)})",
                shorten(text[start : start + 60]),
                cure,
            ) from None
        yield f"{path}:{line}", value
        is_first = False
        end = _skip_space(text, position)
        line += text.count("\n", start, end)
        position = end + 1
        if text[end : end + 1] == "]":
            break
        if text[end : end + 1] != ",":
            got = shorten(text[end : end + 20]) if text[end:] else "the end of the file"
            raise data_error(f"{path}:{line}", "a comma or ] must follow an element of the array", got, cure)
    if text[position:].strip():
        line += text.count("\n", position, _skip_space(text, position))
        raise data_error(f"{path}:{line}", "nothing may follow the array", shorten(text[position:].strip()[:60]), cure)


def read_csv(path: Path) -> Records:
    """Yield one record of text cells a line; the first line names the columns."""
    csv.field_size_limit(2**31 - 1)
    reader = csv.reader((text for _, text in _text_lines(path)), strict=True)
    header: list[str] | None = None
    while True:
        line = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise data_error(
                f"{path}:{line}", f"must be CSV ({error})", "a line that is not", "Repair the quotes from this line on."
            ) from None
        place = f"{path}:{line}"
        if not cells:
            continue
        if header is None:
            if len(set(cells)) < len(cells) or "" in cells:
                raise data_error(
                    place, "the first line must name each column once", shorten(cells), "Name the columns."
                )
            header = cells
        elif len(cells) != len(header):
            rule = f"must have as many cells as the first line, {len(header)}"
            yield place, BadRow(place, "wrong number of cells", rule, f"{len(cells)}: {shorten(cells)}")
        else:
            yield place, dict(zip(header, cells, strict=True))


def read_parquet(path: Path) -> Records:
    """Yield a Parquet file's rows, batch by batch."""
    place = str(path)
    try:
        file = pq.ParquetFile(path)
        batches = file.iter_batches(batch_size=BATCH_ROWS)
    except ARROW_ERRORS as error:
        raise _unreadable(place, "Parquet", error) from None
    yield from read_batches(place, "Parquet", batches)


def read_arrow(path: Path) -> Records:
    """Yield the rows of an Arrow IPC file or stream, batch by batch."""
    place = str(path)
    with path.open("rb") as file:
        is_file_format = file.read(6) == b"ARROW1"
    try:
        source = pa.memory_map(str(path))
        if is_file_format:
            reader = pa.ipc.open_file(source)
            batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
        else:
            batches = iter(pa.ipc.open_stream(source))
    except ARROW_ERRORS as error:
        raise _unreadable(place, "Arrow", error) from None
    yield from read_batches(place, "Arrow", batches)


def read_batches(place: str, container: str, batches: Iterator[Any]) -> Records:
    """Yield the rows of Arrow batches or tables; rows are numbered from 0."""
    number = 0
    while True:
        try:
            batch = next(batches, None)
            if batch is None:
                return
            # A damaged file can hold offsets that point outside its buffers: reading those would end the process.
            batch.validate(full=True)
            records = batch.to_pylist()
        except ARROW_ERRORS as error:
            raise _unreadable(f"{place}:row {number}", container, error) from None
        for record in records:
            yield f"{place}:row {number}", {key: _without_nulls(value) for key, value in record.items()}
            number += 1


READERS: dict[str, Callable[[Path], Records]] = {
    ".jsonl": read_json_lines,
    ".ndjson": read_json_lines,
    ".json": read_json,
    ".csv": read_csv,
    ".parquet": read_parquet,
    ".arrow": read_arrow,
}


def parse_json(text: str) -> object:
    """Return the value of a JSON text; raises ValueError or RecursionError, also for a key given twice."""
    return json.loads(text, object_pairs_hook=_unique_keys)


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


def _skip_space(text: str, position: int) -> int:
    while text[position : position + 1] in {" ", "\t", "\n", "\r"}:
        position += 1
    return position


def _text_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line number from 1, text with its line end); strict UTF-8 without its byte order mark."""
    cure = "Save the file as UTF-8."
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if number == 1:
                raw = raw.removeprefix(b"\xef\xbb\xbf")
                if raw.startswith(UTF16_AND_32_BOMS) or b"\0" in raw[:4]:
                    raise data_error(f"{path}:1", "must be UTF-8 text", f"UTF-16 or UTF-32, {raw[:4]!r}", cure)
            try:
                text = raw.decode("utf-8")
            except UnicodeDecodeError as error:
                got = f"the byte 0x{raw[error.start]:02x} at column {error.start + 1}"
                raise data_error(f"{path}:{number}", "must be UTF-8 text", got, cure) from None
            yield number, text


def _without_nulls(value: object) -> object:
    """Drop the None members of nested structs: Arrow gives every struct of a column all the column's fields."""
    if isinstance(value, dict):
        return {key: _without_nulls(member) for key, member in value.items() if member is not None}
    if isinstance(value, list):
        return [_without_nulls(member) for member in value]
    return value


def _unreadable(place: str, container: str, error: BaseException) -> Exception:
    reason = " ".join(str(error).split())[:120] or type(error).__name__
    return data_error(place, f"must be a readable {container} file", reason, "Write the file again.")
