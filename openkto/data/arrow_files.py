"""Read Parquet, Arrow and what the datasets library holds, batch by batch."""

from collections.abc import Iterator
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq

from openkto.data.json_files import Records
from openkto.data.problems import Findings, data_error
from openkto.data.text_files import DataFile

BATCH_ROWS = 1000
# What pyarrow raises on damaged bytes; its own exceptions derive from several of Python's.
ARROW_ERRORS = (pa.ArrowException, OSError, ValueError, KeyError, NotImplementedError, OverflowError, MemoryError)


def read_parquet(file: DataFile, findings: Findings) -> Records:
    """Yield a Parquet file's rows, batch by batch."""
    try:
        opened = pq.ParquetFile(file.path)
        batches = opened.iter_batches(batch_size=BATCH_ROWS)
    except ARROW_ERRORS as error:
        raise _unreadable(file.name, "Parquet", error) from None
    yield from read_batches(file.name, "Parquet", batches, findings)


def read_arrow(file: DataFile, findings: Findings) -> Records:
    """Yield the rows of an Arrow IPC file or stream, batch by batch."""
    with file.path.open("rb") as opened:
        is_file_format = opened.read(6) == b"ARROW1"
    try:
        source = pa.memory_map(str(file.path))
        if is_file_format:
            reader = pa.ipc.open_file(source)
            batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
        else:
            batches = iter(pa.ipc.open_stream(source))
    except ARROW_ERRORS as error:
        raise _unreadable(file.name, "Arrow", error) from None
    yield from read_batches(file.name, "Arrow", batches, findings)


def read_batches(place: str, container: str, batches: Iterator[Any], findings: Findings) -> Records:
    """Yield the rows of Arrow batches or tables; rows are numbered from 0. Class labels become their names."""
    number = 0
    features: datasets.Features | None = None
    while True:
        try:
            batch = next(batches, None)
            if batch is None:
                return
            # A damaged file can hold offsets that point outside its buffers: reading those would end the process.
            batch.validate(full=True)
            if features is None:
                features = _features(batch.schema)
                for name, names in _class_labels(features):
                    findings.add(place, f"the classes of {name} are read by their names, {', '.join(names[:6])}")
            records = batch.to_pylist()
        except ARROW_ERRORS as error:
            raise _unreadable(f"{place}:row {number}", container, error) from None
        for record in records:
            named = {key: _named(value, features.get(key)) for key, value in record.items()}
            yield f"{place}:row {number}", {key: _without_nulls(value) for key, value in named.items()}
            number += 1


def _features(schema: pa.Schema) -> datasets.Features:
    """Return the columns' kinds that the datasets library wrote into a file; none where another program wrote it."""
    if b"huggingface" not in (schema.metadata or {}):
        return datasets.Features()
    # Whatever the library raises on what stands there means that it cannot be read.
    try:
        return datasets.Features.from_arrow_schema(schema)
    except Exception as error:
        raise ValueError(f"columns' kinds that cannot be read: {type(error).__name__}") from None


def _class_labels(features: datasets.Features) -> list[tuple[str, list[str]]]:
    return [(name, kind.names) for name, kind in features.items() if isinstance(kind, datasets.ClassLabel)]


def _named(value: object, kind: Any) -> object:
    """Return a value with the names of classes for their numbers; datasets writes -1 where there is none."""
    if isinstance(kind, datasets.ClassLabel) and isinstance(value, int):
        return kind.names[value] if 0 <= value < len(kind.names) else None
    if isinstance(kind, dict) and isinstance(value, dict):
        return {name: _named(member, kind.get(name)) for name, member in value.items()}
    if isinstance(kind, datasets.List) and isinstance(value, list):
        return [_named(member, kind.feature) for member in value]
    return value


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
