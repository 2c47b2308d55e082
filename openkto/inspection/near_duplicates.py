"""Rows that say almost the same: most runs of three words are common to both prompts, and to both completions.

Source: Broder, "On the resemblance and containment of documents" (1997): MinHash over shingles. Rows that agree in a
band of hashes are compared, and count where the shares themselves reach the threshold.
"""

import numpy as np
from numpy.typing import NDArray

from openkto.inspection.words import Words, WordTexts

SHINGLE = 3  # words
THRESHOLD = 0.8  # of the Jaccard index, of prompts and of completions
BANDS = 12  # of 3 hashes of the completion and 1 of the prompt: a pair at the threshold is met with 99.8%
HASHES_OF_COMPLETION = 3
MOST_COMPARED = 3  # rows of a bucket that a row is compared with: the first ones of it
METHOD = (
    f"the Jaccard index of the {SHINGLE}-word shingles is at least {THRESHOLD} both of the prompts and of the "
    f"completions, without regard to case and punctuation; candidates are found by MinHash ({BANDS} bands)"
)


def near_duplicates(prompts: WordTexts, completions: WordTexts, exact: NDArray[np.int64]) -> dict[int, int]:
    """Return the rows that are nearly another, earlier row, with that row.

    Args:
        exact: a number for each row, the same for rows with the same prompt and completion, which are no near ones.
    """
    keys = _band_keys(prompts, completions)
    found: dict[int, int] = {}
    for band in range(BANDS):
        order = np.argsort(keys[:, band], kind="stable")
        same = keys[order[1:], band] == keys[order[:-1], band]
        edges = np.flatnonzero(np.diff(np.concatenate([[False], same, [False]]).astype(np.int8)))
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            _compare(order[start : end + 1], prompts, completions, exact, found)
    return found


def _compare(
    bucket: NDArray[np.int64],
    prompts: WordTexts,
    completions: WordTexts,
    exact: NDArray[np.int64],
    found: dict[int, int],
) -> None:
    """Compare the rows of a bucket with its first ones of different texts."""
    _, first = np.unique(exact[bucket], return_index=True)
    different = bucket[np.sort(first)]  # the copies of a row follow it
    for place, row in enumerate(different[1:].tolist(), 1):
        if row in found:
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


def _band_keys(prompts: WordTexts, completions: WordTexts) -> NDArray[np.uint64]:
    """Return each row's key in each band, [rows, bands]."""
    generator = np.random.default_rng(0)
    keys = np.zeros((len(prompts), BANDS), dtype=np.uint64)
    for texts, count in ((completions, HASHES_OF_COMPLETION), (prompts, 1)):
        multipliers = generator.integers(2**63, size=BANDS * count, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
        for first, words, text in texts.chunks():
            shingles, of_text = _shingles(words, text)
            texts_here, starts = np.unique(of_text, return_index=True)
            if not len(starts):
                continue
            for number, multiplier in enumerate(multipliers):
                smallest = np.minimum.reduceat(_mixed(shingles * multiplier), starts)
                rows, band = first + texts_here, number % BANDS
                keys[rows, band] = _mixed(keys[rows, band] * np.uint64(31) + smallest)
    return keys


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
