"""Read labels: desirable or undesirable, in one convention a file.

A file that writes labels in two ways (true and 0, or 0 and -1) has been put together from two sources, and what its
values mean would be a guess; so the first value of a second convention is an error that names the first.
"""

import numpy as np

from openkto.data.problems import BadRow, shorten

BOOLEANS = "true/false"
ZERO_ONE = "1/0"
PLUS_MINUS = "1/-1"
WORDS = "words"

DESIRABLE_WORDS = ("good", "desirable", "chosen", "yes", "up", "positive", "like", "thumbs_up", "\U0001f44d")
UNDESIRABLE_WORDS = ("bad", "undesirable", "rejected", "no", "down", "negative", "dislike", "thumbs_down", "\U0001f44e")

# Equal numbers are equal keys, so that 1.0 is found as well.
_NUMBERS: dict[float, tuple[bool, set[str]]] = {
    1: (True, {ZERO_ONE, PLUS_MINUS}),
    0: (False, {ZERO_ONE}),
    -1: (False, {PLUS_MINUS}),
}
_TEXTS = {
    "true": (True, {BOOLEANS}),
    "false": (False, {BOOLEANS}),
    **{text: _NUMBERS[round(float(text))] for text in ("1", "+1", "1.0", "0", "0.0", "-1", "-1.0")},
    **{word: (True, {WORDS}) for word in DESIRABLE_WORDS},
    **{word: (False, {WORDS}) for word in UNDESIRABLE_WORDS},
}
RULE = (
    "label must be true or false, 1 or 0, 1 or -1, or one of the words"
    f" {', '.join(f'{good}/{bad}' for good, bad in zip(DESIRABLE_WORDS, UNDESIRABLE_WORDS, strict=True))}"
)


class LabelReader:
    """Reads the labels of one file in order and holds it to one convention."""

    def __init__(self) -> None:
        self._conventions: set[str] = set()
        self._first: tuple[str, str] = ("", "")  # the place and value that narrowed the convention last

    def read(self, place: str, value: object) -> bool:
        """Return whether a label says desirable; raises BadRow."""
        found = _meaning(value)
        if found is None:
            raise BadRow(place, "label", RULE, shorten(value))
        is_desirable, conventions = found
        if not self._conventions:
            self._conventions, self._first = set(conventions), (place, shorten(value))
        elif not self._conventions & conventions:
            first_place, first_value = self._first
            rule = f"labels of one file must keep one convention ({first_place} has {first_value})"
            cure = "Write all labels of the file in one way, or pass --on_bad_rows skip to leave such rows out."
            raise BadRow(place, "label of another convention", rule, shorten(value), cure)
        elif self._conventions - conventions:
            self._conventions, self._first = self._conventions & conventions, (place, shorten(value))
        return is_desirable


def _meaning(value: object) -> tuple[bool, set[str]] | None:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool):
        return value, {BOOLEANS}
    if isinstance(value, (int, float)):
        return _NUMBERS.get(value)
    if isinstance(value, str):
        return _TEXTS.get(value.strip().lower())
    return None
