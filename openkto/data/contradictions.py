"""Count the texts that have both labels: users changed their mind or disagree. Such rows cancel each other."""

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
    text, size, is_both = texts_labelled_both_ways(prompt_keys, completion_keys, labels)
    if not is_both.any():
        return []
    is_first = text == text[np.argmax(is_both[text])]
    pair = (int(rows[is_first & (labels == label)].min()) for label in (True, False))
    return [int(is_both.sum()), int(size[is_both].sum()), *sorted(pair)]


def texts_labelled_both_ways(
    prompt_keys: np.ndarray, completion_keys: np.ndarray, labels: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return each row's text as a number, the texts' numbers of rows, and whether they are labelled both ways."""
    codes = prompt_keys * (completion_keys.max(initial=0) + 1) + completion_keys
    _, text, size = np.unique(codes, return_inverse=True, return_counts=True)
    desirable = np.bincount(text, weights=labels, minlength=len(size))
    return text, size, (desirable > 0) & (desirable < size)
