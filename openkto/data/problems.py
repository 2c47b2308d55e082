"""The form of the data layer's errors, "place: rule; got value. Cure.", and of what it recognised."""

import reprlib

from openkto.errors import DataError
from openkto.masking import masked

OR_SKIP = ", or pass --on_bad_rows skip to leave such rows out."
ALSO_SKIP = " --on_bad_rows skip leaves such rows out."  # behind a cure of several sentences
FIX_ROW = "Fix the row" + OR_SKIP

# Values come from users' files: a megabyte of text or a thousand levels of nesting must not reach the sentence.
_REPR = reprlib.Repr()
_REPR.maxstring = 60
_REPR.maxother = 60
_REPR.maxlevel = 3


def shorten(value: object, limit: int = 60) -> str:
    """Return the value's repr in at most `limit` characters; it escapes what cannot be printed.

    A text is masked before, since of an address that is cut nobody can say where its password ends.
    """
    text = _REPR.repr(masked(value) if isinstance(value, str) else value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def data_error(place: str, rule: str, got: str, cure: str) -> DataError:
    """Return the error for something that no setting can pass over: a file, a folder, a tokenizer."""
    return DataError(_sentence(place, rule, got, cure))


class BadRow(DataError):
    """One bad row: an error by default, dropped and counted under its `kind` with --on_bad_rows skip."""

    def __init__(self, place: str, kind: str, rule: str, got: str, cure: str = FIX_ROW) -> None:
        super().__init__(_sentence(place, rule, got, cure))
        self.kind = kind

    def when_skipped(self) -> str:
        """Return the sentence without the advice to skip such rows, which was taken."""
        return str(self).replace(OR_SKIP, ".").replace(ALSO_SKIP, "")


class Findings:
    """What readers recognised and left out, a line each, with the first of the places and how many more there are."""

    def __init__(self) -> None:
        self._places: dict[str, tuple[str, int]] = {}

    def add(self, place: str, text: str) -> None:
        first, count = self._places.get(text, (place, 0))
        self._places[text] = first, count + 1

    def lines(self) -> list[str]:
        """Return the lines, in the order of their first places."""
        return [
            f"{first}{f' and {count - 1} more' if count > 1 else ''}: {text}"
            for text, (first, count) in self._places.items()
        ]


def _sentence(place: str, rule: str, got: str, cure: str) -> str:
    """Join the parts; a library's own message, or a shortened value, may bring its full stop."""
    return f"{place}: {rule}; got {got}{'' if got.endswith('.') else '.'} {cure}"
