"""Open a data file, compressed or not, and read its text line by line."""

import bz2
import codecs
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import pyarrow as pa

from openkto.data.problems import data_error

# The marks at the start of a text, the longer ones first; Excel's "Unicode text" is UTF-16.
WIDE_MARKS = {
    **dict.fromkeys((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE), "utf-32"),
    **dict.fromkeys((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE), "utf-16"),
}


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
    """Yield (line number from 1, text with its line end).

    The text is strict UTF-8, or UTF-16 or UTF-32 where it begins with their mark.
    """
    cure = f"Save the file as UTF-8{', in Excel as CSV UTF-8' if file.container == '.csv' else ''}."
    lines = _byte_lines(file)
    first = next(lines, b"")
    wide = next((encoding for mark, encoding in WIDE_MARKS.items() if first.startswith(mark)), None)
    if wide is not None:
        yield from enumerate(_wide_lines(file, chain([first], lines), wide), 1)
        return
    for number, raw in enumerate(chain([first.removeprefix(codecs.BOM_UTF8)], lines), 1):
        if number == 1 and b"\0" in raw[:4]:
            raise data_error(f"{file.name}:1", "must be UTF-8 text", f"UTF-16 or UTF-32, {raw[:4]!r}", cure)
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            got = f"the byte 0x{raw[error.start]:02x} at column {error.start + 1}"
            raise data_error(f"{file.name}:{number}", "must be UTF-8 text", got, cure) from None
        yield number, text


def _wide_lines(file: DataFile, pieces: Iterable[bytes], encoding: str) -> Iterator[str]:
    """Yield the lines of a text of more than a byte a character, in which line ends may stand anywhere."""
    decoder = codecs.getincrementaldecoder(encoding)()
    number, text = 1, ""
    try:
        for piece in pieces:
            *whole, text = (text + decoder.decode(piece)).split("\n")
            for line in whole:
                yield f"{line}\n"
            number += len(whole)
        text += decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        rule = f"must be {encoding.upper()} text, as its first bytes say"
        raise data_error(f"{file.name}:{number}", rule, error.reason, "Save the file as UTF-8.") from None
    if text:
        yield text


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
