"""Rows that say almost the same: most runs of three words are common to both prompts, and to both completions.

Source: Broder, "On the resemblance and containment of documents" (1997): MinHash over shingles. Rows that agree in a
band of hashes are compared, and count where the shares themselves reach the threshold.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from openkto.inspection.column import Column
from openkto.inspection.words import Words, WordTexts

SHINGLE = 3  # words
THRESHOLD = 0.8  # of the Jaccard index, of prompts and of completions
BANDS = 12  # of 3 hashes of the completion and 1 of the prompt: a pair at the threshold is met with 99.8%
HASHES_OF_COMPLETION = 3
MOST_COMPARED = 3  # rows of a bucket that a row is compared with: the first ones of it
NONE = -1
ROWS_AT_A_TIME = 50_000  # whose keys are in memory together
METHOD = (
    f"the Jaccard index of the {SHINGLE}-word shingles is at least {THRESHOLD} both of the prompts and of the "
    f"completions, without regard to case and punctuation; candidates are found by MinHash ({BANDS} bands)"
)


def near_duplicates(
    prompts: WordTexts, completions: WordTexts, exact: NDArray[np.int32], folder: Path
) -> NDArray[np.int32]:
    """Return for each row an earlier one that it nearly is, or NONE.

    Args:
        exact: a number for each row, the same for rows with the same prompt and completion, which are no near ones.
        folder: an empty one, where the keys of the bands go: 8 bytes a row and band.
    """
    found = np.full(len(exact), NONE, dtype=np.int32)
    for keys in _write_keys(prompts, completions, folder):
        key = keys.read()
        order = np.argsort(key, kind="stable").astype(np.int32)
        key = key[order]
        same = np.concatenate([[False], key[1:] == key[:-1], [False]])
        edges = np.flatnonzero(same[1:] != same[:-1])
        del key, same
        for start, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            _compare(order[start : end + 1], prompts, completions, exact, found)
    return found


def _compare(
    bucket: NDArray[np.int32],
    prompts: WordTexts,
    completions: WordTexts,
    exact: NDArray[np.int32],
    found: NDArray[np.int32],
) -> None:
    """Compare the rows of a bucket with its first ones of different texts."""
    _, first = np.unique(exact[bucket], return_index=True)
    different = bucket[np.sort(first)]  # the copies of a row follow it
    for place, row in enumerate(different[1:].tolist(), 1):
        if found[row] != NONE:
            continue
        for other in different[: min(place, MOST_COMPARED)].tolist():
            if jaccard(completions.text(row), completions.text(other)) < THRESHOLD:
                continue
            if jaccard(prompts.text(row), prompts.text(other)) >= THRESHOLD:
                found[row] = other
                break


def jaccard(one: Words, other: Words) -> float:
    """Return the share of two texts' different shingles that is common to both."""
    if np.array_equal(one, other):
        return 1.0
    a, b = (np.unique(_shingles(words, np.zeros(len(words), dtype=np.int64))[0]) for words in (one, other))
    common = len(np.intersect1d(a, b, assume_unique=True))
    return common / max(1, len(a) + len(b) - common)


def _write_keys(prompts: WordTexts, completions: WordTexts, folder: Path) -> list[Column]:
    """Return each band's keys of all rows."""
    generator = np.random.default_rng(0)
    parts = [
        (texts, generator.integers(2**63, size=BANDS * count, dtype=np.uint64) * np.uint64(2) + np.uint64(1))
        for texts, count in ((completions, HASHES_OF_COMPLETION), (prompts, 1))
    ]
    columns = [Column(folder / f"band{band}", np.uint64) for band in range(BANDS)]
    for start in range(0, len(prompts), ROWS_AT_A_TIME):
        end = min(start + ROWS_AT_A_TIME, len(prompts))
        keys = np.zeros((BANDS, end - start), dtype=np.uint64)
        for texts, multipliers in parts:
            for first, words, text in texts.chunks(start, end):
                _add_keys(keys[:, first - start :], words, text, multipliers)
        for column, key in zip(columns, keys, strict=True):
            column.add(key)
    return columns


def _add_keys(keys: NDArray[np.uint64], words: Words, text: NDArray[np.int64], multipliers: NDArray[np.uint64]) -> None:
    """Mix the smallest hashes of some texts into their keys, [bands, texts and more], in place."""
    shingles, of_text = _shingles(words, text)
    texts, starts = np.unique(of_text, return_index=True)
    if not len(starts):
        return
    for number, multiplier in enumerate(multipliers):
        smallest, key = np.minimum.reduceat(_mixed(shingles * multiplier), starts), keys[number % BANDS]
        key[texts] = _mixed(key[texts] * np.uint64(31) + smallest)


def _shingles(words: Words, text: NDArray[np.int64]) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Return a number for each run of words within a text, and its text; of shorter texts the runs are shorter."""
    hashed = np.zeros(len(words), dtype=np.uint64)
    is_whole = np.ones(len(words), dtype=bool)
    is_first = np.concatenate([[True], text[1:] != text[:-1]]) if len(text) else np.zeros(0, dtype=bool)
    for offset in range(SHINGLE):
        following = np.zeros(len(words), dtype=np.uint64)
        count = max(0, len(words) - offset)
        is_here = text[offset:] == text[:count]
        following[:count] = np.where(is_here, words[offset:].astype(np.uint64) + np.uint64(1), np.uint64(0))
        is_whole[count:] = False
        is_whole[:count] &= is_here
        hashed = _mixed(hashed * np.uint64(31) + following)
    kept = is_whole | is_first
    return hashed[kept], text[kept]


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Spread numbers over all 64 bits (the end of MurmurHash3, which is public domain)."""
    values = (values ^ (values >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    mixed: NDArray[np.uint64] = values ^ (values >> np.uint64(29))
    return mixed
