"""Count the texts that have both labels: users changed their mind or disagree. Such rows cancel each other."""

from typing import Any

import numpy as np
from numpy.typing import NDArray


def contradictions(
    rows: NDArray[np.int64], prompt_keys: NDArray[Any], completion_keys: NDArray[Any], labels: NDArray[np.bool_]
) -> list[int]:
    """Return how many texts are labelled both ways, in how many rows, and the first two of these; else nothing.

    Args:
        rows: the rows' numbers.
        prompt_keys, completion_keys: a whole number from 0 for each different one.
        labels: true for desirable.
    """
    is_both, texts = labelled_both_ways(prompt_keys, completion_keys, labels)
    if not texts:
        return []
    first = np.argmax(is_both)
    is_first = (prompt_keys == prompt_keys[first]) & (completion_keys == completion_keys[first])
    pair = (int(rows[is_first & (labels == label)].min()) for label in (True, False))
    return [texts, int(is_both.sum()), *sorted(pair)]


def labelled_both_ways(
    prompt_keys: NDArray[Any], completion_keys: NDArray[Any], labels: NDArray[np.bool_]
) -> tuple[NDArray[np.bool_], int]:
    """Return whether each row's text is labelled both ways, and how many such texts there are."""
    codes = prompt_keys.astype(np.int64) * (int(completion_keys.max(initial=0)) + 1) + completion_keys
    with_label = 2 * codes + labels
    with_label.sort()
    # A text has both labels where its even number and the odd one above it are there, and so stand side by side.
    is_even = with_label[:-1] % 2 == 0
    both = with_label[:-1][is_even & (with_label[1:] == with_label[:-1] + 1)] // 2
    if not len(both):
        return np.zeros(len(labels), dtype=bool), 0
    return both[np.searchsorted(both, codes).clip(max=len(both) - 1)] == codes, len(both)
