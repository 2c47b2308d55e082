"""The words of the rows' texts as numbers in a file, so that a million rows can be compared without holding them."""

import os
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from io import FileIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from openkto.inspection.column import Column

# A letter of the scripts that put no space between words is a word; upper and lower case are one, punctuation is none.
UNSPACED = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
WORD = re.compile(rf"[{UNSPACED}]|[^\W{UNSPACED}]+")
MOST_WORDS = 512  # of a prompt and of a completion, from its start
CHUNK_WORDS = 500_000

Words = NDArray[np.uint32]


@lru_cache(maxsize=2**17)
def _number(word: str) -> int:
    return zlib.crc32(word.encode("utf-8", "replace"))


def numbers_of(text: str) -> Words:
    """Return a number for each of a text's first words, equal for equal words."""
    found = []
    for match in WORD.finditer(text.casefold()):
        found.append(_number(match.group()))
        if len(found) == MOST_WORDS:
            break
    return np.array(found, dtype=np.uint32)


class WordFile:
    """Writes the words of text after text, then reads them back by the texts' numbers."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lengths = Column(path.with_suffix(".lengths"), np.uint16)

    def add(self, texts: list[str]) -> None:
        """Append the words of some texts."""
        words = [numbers_of(text) for text in texts]
        with self._path.open("ab") as file:
            file.write(b"".join(of_text.tobytes() for of_text in words))
        self._lengths.add(np.array([len(of_text) for of_text in words]))

    @contextmanager
    def read(self) -> "Iterator[WordTexts]":
        """Open what was written."""
        starts = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(self._lengths.read(), dtype=np.int64)])
        with self._path.open("rb", buffering=0) as file:
            yield WordTexts(file, starts)


@dataclass(frozen=True)
class WordTexts:
    """The words of all texts, one after another in a file; text i is `starts[i]` to `starts[i + 1]`.

    They are read and not mapped into memory, where they would count as the process's.
    """

    file: FileIO
    starts: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.starts) - 1

    def text(self, index: int) -> Words:
        """Return the words of a text."""
        return self._words(index, index + 1)

    def chunks(self, first: int, last: int) -> Iterator[tuple[int, Words, NDArray[np.int64]]]:
        """Yield neighbouring texts as (number of the first, their words, the text in the chunk that each is of)."""
        while first < last:
            end = int(np.searchsorted(self.starts, self.starts[first] + CHUNK_WORDS, side="right")) - 1
            end = min(max(first + 1, end), last)
            lengths = np.diff(self.starts[first : end + 1])
            yield first, self._words(first, end), np.repeat(np.arange(end - first), lengths)
            first = end

    def _words(self, first: int, last: int) -> Words:
        start, end = int(self.starts[first]), int(self.starts[last])
        size = np.dtype(np.uint32).itemsize
        return np.frombuffer(os.pread(self.file.fileno(), (end - start) * size, start * size), dtype=np.uint32)
