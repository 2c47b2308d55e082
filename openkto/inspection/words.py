"""The words of the rows' texts as numbers in a file, so that a million rows can be compared without holding them."""

import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

# A letter of the scripts that put no space between words is a word; upper and lower case are one, punctuation is none.
UNSPACED = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
WORD = re.compile(rf"[{UNSPACED}]|[^\W{UNSPACED}]+")
MOST_WORDS = 512  # of a prompt and of a completion, from its start
CHUNK_WORDS = 2_000_000

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
        self._file = path.open("wb")
        self._lengths: list[NDArray[np.int64]] = []
        self._pending: list[int] = []

    def add(self, text: str) -> None:
        """Append the words of a text."""
        words = numbers_of(text)
        self._file.write(words.tobytes())
        self._pending.append(len(words))
        if len(self._pending) == 100_000:
            self._settle()

    def _settle(self) -> None:
        self._lengths.append(np.array(self._pending, dtype=np.int64))
        self._pending = []

    def close(self) -> "WordTexts":
        """Return what was written, mapped into memory."""
        self._settle()
        self._file.close()
        starts = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(np.concatenate(self._lengths))])
        words = np.memmap(self._path, dtype=np.uint32, mode="r") if starts[-1] else np.zeros(0, dtype=np.uint32)
        return WordTexts(words, starts)


@dataclass(frozen=True)
class WordTexts:
    """The words of all texts, one after another; text i is `words[starts[i]:starts[i + 1]]`."""

    words: Words
    starts: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.starts) - 1

    def text(self, index: int) -> Words:
        """Return the words of a text."""
        return self.words[self.starts[index] : self.starts[index + 1]]

    def chunks(self) -> Iterator[tuple[int, Words, NDArray[np.int64]]]:
        """Yield neighbouring texts as (number of the first, their words, the text in the chunk that each is of)."""
        first = 0
        while first < len(self):
            last = int(np.searchsorted(self.starts, self.starts[first] + CHUNK_WORDS, side="right")) - 1
            last = max(first + 1, last)
            lengths = np.diff(self.starts[first : last + 1])
            words = np.asarray(self.words[self.starts[first] : self.starts[last]])
            yield first, words, np.repeat(np.arange(last - first), lengths)
            first = last
