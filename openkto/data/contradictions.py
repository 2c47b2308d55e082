"""Count the texts that are labelled both ways: a user who changed the thumb, or two who disagree. They cancel."""

import numpy as np


def contradictions(
    rows: np.ndarray, prompt_keys: np.ndarray, completion_keys: np.ndarray, labels: np.ndarray
) -> list[int]:
    """Return how many texts are labelled both ways, in how many rows, and the first two of these; else nothing.

    Args:
        rows: the rows' numbers.
        prompt_keys, completion_keys: a whole number from 0 for each different one.
        labels: true for desirable.
    """
    codes = prompt_keys * (completion_keys.max(initial=0) + 1) + completion_keys
    _, text, size = np.unique(codes, return_inverse=True, return_counts=True)
    desirable = np.bincount(text, weights=labels, minlength=len(size))
    is_both = (desirable > 0) & (desirable < size)
    if not is_both.any():
        return []
    is_first = text == text[np.argmax(is_both[text])]
    pair = (int(rows[is_first & (labels == label)].min()) for label in (True, False))
    return [int(is_both.sum()), int(size[is_both].sum()), *sorted(pair)]
