"""Open a data file, compressed or not, and read its text line by line."""

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from openkto.data.problems import data_error

UTF16_AND_32_BOMS = (b"\xff\xfe", b"\xfe\xff")


def _open_zstd(path: Path) -> io.BufferedIOBase:
    return io.BufferedReader(pa.input_stream(str(path), compression="zstd"))


COMPRESSIONS: dict[str, Callable[[Path], io.BufferedIOBase]] = {
    ".gz": gzip.GzipFile,
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
    ".zst": _open_zstd,
}
# What the libraries raise on a damaged or cut file.
DECOMPRESSION_ERRORS = (OSError, EOFError, zlib.error, lzma.LZMAError, pa.ArrowException)


@dataclass(frozen=True)
class DataFile:
    """A file on this machine. Its name says what it holds, and stands in messages: that of a URL is the URL."""

    path: Path
    name: str

    @property
    def compression(self) -> str:
        """The suffix that says how the file is compressed; empty for one that is not."""
        suffix = _suffix(self.name)
        return suffix if suffix in COMPRESSIONS else ""

    @property
    def container(self) -> str:
        """The suffix that says what the file holds, such as .jsonl."""
        return _suffix(self.name[: len(self.name) - len(self.compression)])


def text_lines(file: DataFile) -> Iterator[tuple[int, str]]:
    """Yield (line number from 1, text with its line end); strict UTF-8 without its byte order mark."""
    cure = "Save the file as UTF-8."
    for number, raw in enumerate(_byte_lines(file), 1):
        if number == 1:
            raw = raw.removeprefix(b"\xef\xbb\xbf")
            if raw.startswith(UTF16_AND_32_BOMS) or b"\0" in raw[:4]:
                raise data_error(f"{file.name}:1", "must be UTF-8 text", f"UTF-16 or UTF-32, {raw[:4]!r}", cure)
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            got = f"the byte 0x{raw[error.start]:02x} at column {error.start + 1}"
            raise data_error(f"{file.name}:{number}", "must be UTF-8 text", got, cure) from None
        yield number, text


def _byte_lines(file: DataFile) -> Iterator[bytes]:
    if not file.compression:
        with file.path.open("rb") as opened:
            yield from opened
        return
    number = 0
    try:
        with COMPRESSIONS[file.compression](file.path) as opened:
            for line in opened:
                number += 1
                yield line
    except DECOMPRESSION_ERRORS as error:
        got = " ".join(str(error).split())[:120] or type(error).__name__
        place = f"{file.name}:{number + 1}"
        raise data_error(place, f"must be a whole {file.compression} file", got, "Write or copy it again.") from None


def _suffix(name: str) -> str:
    return Path(name).suffix.lower()
