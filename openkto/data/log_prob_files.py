"""Log-probabilities on disk: small Parquet files that are only ever added, each named after its own sha256.

    <folder>/about.json                  what the numbers are of, to read
    <folder>/part-<sha256>.parquet       key (16 bytes), log_prob (float64, nats)
    <folder>/begun-<needs>-<plan>.keys   the keys' first 12 bytes that a fill set out to compute; gone when it is done
    <folder>/.part-<who>.part            one that is being written; of a killed run it is debris, which goes

A part is written under another name, flushed to the disk and renamed: it is whole or not there. One whose content is
not what its name says is thrown away, and what it held is computed again.
"""

import hashlib
import io
import json
import logging
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from openkto.errors import CacheError
from openkto.files import delete, delete_leftovers, make_writable, scratch_name, write_flushed

log = logging.getLogger(__name__)

PREFIX, SUFFIX = "part-", ".parquet"
SHORT_KEY_BYTES = 12  # enough to tell a key
SCHEMA = pa.schema([("key", pa.binary(16)), ("log_prob", pa.float64())])

Values = dict[bytes, float]


def read_parts(folder: Path) -> dict[str, Values]:
    """Return every whole part of the folder by its name; a damaged one is removed, and said.

    Raises:
        CacheError: the folder cannot be read.
    """
    parts = {}
    try:
        for path in sorted(folder.glob(f"{PREFIX}*{SUFFIX}")):
            content = path.read_bytes()
            if path.name == _name(content):
                parts[path.name] = _values(content)
                continue
            log.warning("warning: %s is damaged and was removed; what it held is computed again.", path)
            path.unlink(missing_ok=True)
    except OSError as error:
        raise cannot_use(folder, error) from error
    return parts


def read_named(folder: Path, names: list[str]) -> Values | None:
    """Return the values of these parts together, or nothing where one of them is not there as it should be."""
    values: Values = {}
    for name in names:
        try:
            content = (folder / name).read_bytes()
        except OSError:
            return None
        if name != _name(content):
            return None
        values |= _values(content)
    return values


def make_folder(folder: Path) -> None:
    """Make the folder and see that it can be written, before hours of work are to go there.

    Raises:
        CacheError: it cannot.
    """
    try:
        make_writable(folder)
    except OSError as error:
        raise cannot_use(folder, error) from error


def read_begun(folder: Path, needs: str, plan: str) -> set[bytes]:
    """Return what a fill that did not come to its end set out to compute; nothing where there is none.

    Args:
        needs: a name for all that the run needs.
        plan: a name for what decides which values are computed together.

    Raises:
        CacheError: the folder cannot be read.
    """
    try:
        content = (folder / _begun(needs, plan)).read_bytes()
    except FileNotFoundError:
        return set()
    except OSError as error:
        raise cannot_use(folder, error) from error
    return {content[i : i + SHORT_KEY_BYTES] for i in range(0, len(content), SHORT_KEY_BYTES)}


def write_begun(folder: Path, needs: str, plan: str, short_keys: list[bytes]) -> None:
    """Note what a fill sets out to compute; see `read_begun`.

    Raises:
        CacheError: the folder cannot be written.
    """
    try:
        _write(folder / _begun(needs, plan), b"".join(short_keys))
    except OSError as error:
        raise cannot_use(folder, error) from error


def delete_begun(folder: Path, needs: str) -> None:
    """Note that all which a run needs is computed."""
    for path in folder.glob(_begun(needs, "*")):
        delete(path)


def _begun(needs: str, plan: str) -> str:
    return f"begun-{needs}-{plan}.keys"


def write_part(folder: Path, about: dict[str, Any], values: Values) -> None:
    """Add a part.

    Raises:
        CacheError: the folder cannot be written.
    """
    buffer = io.BytesIO()
    columns = [pa.array(values.keys(), SCHEMA.field("key").type), pa.array(values.values(), pa.float64())]
    pq.write_table(pa.table(columns, schema=SCHEMA), buffer)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        delete_leftovers(folder)
        if not (folder / "about.json").exists():
            _write(folder / "about.json", (json.dumps(about, indent=2) + "\n").encode())
        _write(folder / _name(buffer.getvalue()), buffer.getvalue())
    except OSError as error:
        raise cannot_use(folder, error) from error


def cannot_use(folder: Path, error: OSError) -> CacheError:
    """Return the error of a folder that cannot be read or written."""
    return CacheError(
        f"--ref_cache_dir: must be a folder that can be read and written; got {folder} ({error.strerror or error}). "
        "Name another, or make room there."
    )


def _write(path: Path, content: bytes) -> None:
    temporary = path.with_name(scratch_name(f".{PREFIX}"))
    write_flushed(temporary, content)
    temporary.rename(path)


def _name(content: bytes) -> str:
    return f"{PREFIX}{hashlib.sha256(content).hexdigest()}{SUFFIX}"


def _values(content: bytes) -> Values:
    table = pq.read_table(pa.BufferReader(content))
    return dict(zip(table.column("key").to_pylist(), table.column("log_prob").to_pylist(), strict=True))
