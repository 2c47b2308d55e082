"""Read labels: desirable, undesirable, or left out, in one convention per file.

A file that writes labels in two ways (true and 0, or 0 and -1) has been put together from two sources, and what its
values mean would be a guess; so the first value of a second convention is an error that names the first. Where a column
holds other numbers than 1 and 0, or 1 and -1, it holds scores, and its 1 may be the worst of them; where its name says
that a set one is undesirable, 1 and yes may say so too. Neither can be skipped, since the rows that are left would be
read the wrong way round. --label_map and --label_threshold say themselves what values mean.
"""

import math
import re
from collections.abc import Mapping
from decimal import Decimal

import numpy as np

from openkto.data.fields import is_missing, words_of
from openkto.data.problems import OR_SKIP, BadRow, data_error, shorten
from openkto.errors import DataError

BOOLEANS = "true/false"
ZERO_ONE = "1/0"
PLUS_MINUS = "1/-1"
WORDS = "words"

# Compared without case, blanks, hyphens and underscores; of an emoji without its skin tone and variation.
DESIRABLE_WORDS = (
    *("good", "desirable", "chosen", "yes", "y", "up", "positive", "pos", "like", "liked", "thumbsup", "upvote"),
    *("upvoted", "accepted", "accept", "approved", "correct", "right", "helpful", "preferred", "\U0001f44d"),
)
UNDESIRABLE_WORDS = (
    *("bad", "undesirable", "rejected", "no", "n", "down", "negative", "neg", "dislike", "disliked", "thumbsdown"),
    *("downvote", "downvoted", "reject", "disapproved", "incorrect", "wrong", "unhelpful", "dispreferred"),
    "\U0001f44e",
)

# Equal numbers are equal keys, so that 1.0 is found as well.
_NUMBERS: dict[float, tuple[bool, set[str]]] = {
    1: (True, {ZERO_ONE, PLUS_MINUS}),
    0: (False, {ZERO_ONE}),
    -1: (False, {PLUS_MINUS}),
}
_TEXTS = {
    **{text: (True, {BOOLEANS}) for text in ("true", "t")},
    **{text: (False, {BOOLEANS}) for text in ("false", "f")},
}
# Of a table of text: a minus may be the long one, and a decimal point a comma.
_DECIMAL = re.compile(r"[+-]?(\d+([.,]\d*)?|[.,]\d+)(e[+-]?\d+)?", re.IGNORECASE)
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(,\d{3})+")
_WORDS = {word: True for word in DESIRABLE_WORDS} | {word: False for word in UNDESIRABLE_WORDS}
_NOT_PART_OF_A_WORD = re.compile("[\\s_:-]|\ufe0f|[\U0001f3fb-\U0001f3ff]")
RULE = (
    "must be true or false, 1 or 0, 1 or -1, or a word such as good/bad, yes/no, up/down, like/dislike,"
    " thumbs_up/thumbs_down, \U0001f44d/\U0001f44e (docs/data.md has them all)"
)


# Names of a column whose set values say that the answer is undesirable, beside the words above.
_UNDESIRABLE_NAMES = {
    *(word for word in UNDESIRABLE_WORDS if word not in ("no", "n")),
    *("downvotes", "dislikes", "flag", "flagged", "toxic", "harmful", "unsafe", "offensive", "spam", "error", "failed"),
    *("failure", "hallucination", "hallucinated", "complaint", "worse"),
}
_WHETHER = {"yes", "y", "no", "n"}  # the words that say whether, and not which


class LabelReader:
    """Reads the labels of one file in order and holds it to one convention, or to the one that is given.

    Args:
        meanings: what each value means, and nothing else does; None leaves the row out.
        threshold: desirable from the larger number; undesirable up to the smaller, or below a single one.
        name: the field that labels stand in, as errors call it.
    """

    def __init__(
        self,
        meanings: Mapping[str, bool | None] | None = None,
        threshold: tuple[float, ...] = (),
        name: str = "label",
    ) -> None:
        self._name = name
        self._meanings = None if meanings is None else {_plain(key): value for key, value in meanings.items()}
        self._threshold = threshold
        self._conventions: set[str] = set()
        self._first: tuple[str, str] = ("", "")  # the place and value that narrowed the convention last
        words = set(words_of(name))
        is_bad = bool(words & _UNDESIRABLE_NAMES) and not words & set(DESIRABLE_WORDS)
        self._is_undesirable_name = is_bad or bool(words & {"not", "non"})

    def read(self, place: str, value: object) -> bool | None:
        """Return whether a label says desirable, or None for a row to leave out; raises BadRow."""
        if isinstance(value, np.generic):
            value = value.item()
        if isinstance(value, Decimal) and not is_missing(value):
            value = float(value)
        if self._meanings is not None:
            return self._mapped(place, value, self._meanings)
        if self._threshold:
            return self._compared(place, value)
        found = _meaning(value)
        if found is None:
            if self._conventions <= {ZERO_ONE, PLUS_MINUS} and _is_score(value):
                raise self._scores(place, value)
            raise BadRow(place, "label", f"{self._name} {RULE}", _quoted(value), _cure(value))
        is_desirable, conventions = found
        if self._is_undesirable_name and (WORDS not in conventions or str(value).strip().casefold() in _WHETHER):
            raise self._opposite(place, value)
        if not self._conventions:
            self._conventions, self._first = set(conventions), (place, shorten(value))
        elif not self._conventions & conventions:
            if self._conventions | conventions <= {ZERO_ONE, PLUS_MINUS}:
                raise self._scores(place, value)
            first_place, first_value = self._first
            rule = f"labels of one file must follow one convention ({first_place} has {first_value})"
            cure = "Write all labels of the file in one way" + OR_SKIP
            raise BadRow(place, "label of another convention", rule, shorten(value), cure)
        elif self._conventions - conventions:
            self._conventions, self._first = self._conventions & conventions, (place, shorten(value))
        return is_desirable

    def _scores(self, place: str, value: object) -> DataError:
        """Return the error for a number beside which 1, 0 and -1 do not say what they seem to."""
        place_of_first, first = self._first
        beside = f" beside {first} ({place_of_first})" if first else ""
        rule = f"where {self._name} is a number, it must be 1 or 0, or 1 or -1, in the whole file"
        cure = (
            "Read scores with --label_threshold, such as --label_threshold 4 2 (desirable from 4, undesirable up to 2),"
            " or say what each number means, such as --label_map 1=true 0=none -1=false."
        )
        return data_error(place, rule, _quoted(value) + beside, cure)

    def _opposite(self, place: str, value: object) -> DataError:
        """Return the error for a column of undesirable marks, of which 1 would be read as desirable."""
        rule = f"{self._name} is called as if a set one were undesirable, so what its values mean must be said"
        cure = (
            "Pass --label_map 1=false 0=true where 1 marks a bad answer, 1=true 0=false where it marks a good one;"
            " likewise for other values."
        )
        return data_error(place, rule, shorten(value), cure)

    def _mapped(self, place: str, value: object, meanings: Mapping[str, bool | None]) -> bool | None:
        key = _plain(value)
        if key not in meanings:
            rule = f"{self._name} must be one that --label_map names ({', '.join(list(meanings)[:12])})"
            raise BadRow(place, "label", rule, _quoted(value), "Add it, as VALUE=true, VALUE=false or VALUE=none.")
        return meanings[key]

    def _compared(self, place: str, value: object) -> bool | None:
        if is_missing(value) or value == "":
            return None
        number = None if isinstance(value, bool) else as_number(value)
        if number is None:
            rule = f"{self._name} must be a number to be read by --label_threshold"
            raise BadRow(place, "label", rule, shorten(value))
        if number >= max(self._threshold):
            return True
        is_low = number < self._threshold[0] if len(self._threshold) == 1 else number <= min(self._threshold)
        return False if is_low else None


def _plain(value: object) -> str:
    """Return a label as --label_map compares it: 1.0 is 1, True is true, null is null, Good is good."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return "null" if is_missing(value) else str(value).strip().casefold()


def as_number(value: object) -> float | None:
    """Return a number, or the one that a text holds; None where there is none, or it can be read in two ways."""
    if isinstance(value, str):
        value = value.strip().replace("\u2212", "-")
        if _DECIMAL.fullmatch(value) is None or _THOUSANDS.fullmatch(value):
            return None
        value = value.replace(",", ".")
    if not isinstance(value, (int, float, str)):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def _is_score(value: object) -> bool:
    number = None if isinstance(value, bool) else as_number(value)
    return number is not None and not math.isnan(number)


def _quoted(value: object) -> str:
    """Return a label as its file has it: NaN and Infinity as in JSON, of which Python's reader takes them."""
    if isinstance(value, float) and math.isnan(value):
        return "NaN"
    if isinstance(value, float) and math.isinf(value):
        return f"{'-' if value < 0 else ''}Infinity, or a number too large for a float"
    return shorten(value)


def _cure(value: object) -> str:
    if isinstance(value, dict) and value:
        return f"Name the field inside it with a dot, as in --label_key label.{next(iter(value))}{OR_SKIP}"
    if _is_score(value):
        cure = "Read scores with --label_threshold, such as --label_threshold 4"
    elif isinstance(value, str) and value.strip():
        cure = "Say what other words mean with --label_map, such as --label_map great=true awful=false"
    else:
        cure = "Fix the row"
    return cure + OR_SKIP


def _meaning(value: object) -> tuple[bool, set[str]] | None:
    if isinstance(value, bool):
        return value, {BOOLEANS}
    if isinstance(value, (int, float)):
        return _NUMBERS.get(value)
    if not isinstance(value, str):
        return None
    text = value.strip().casefold()
    if text in _TEXTS:
        return _TEXTS[text]
    number = as_number(text)
    if number is not None:
        return _NUMBERS.get(number)
    word = _NOT_PART_OF_A_WORD.sub("", text)
    return (_WORDS[word], {WORDS}) if word in _WORDS else None
