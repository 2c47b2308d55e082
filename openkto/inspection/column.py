"""A number for each row, kept in a file until it is needed, and what can be told of such numbers with little memory."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray


class Column:
    """Appends values to a file, and reads all of them back."""

    def __init__(self, path: Path, dtype: DTypeLike) -> None:
        self._path, self._dtype = path, np.dtype(dtype)

    def add(self, values: NDArray[Any]) -> None:
        """Append some values."""
        with self._path.open("ab") as file:
            file.write(values.astype(self._dtype).tobytes())

    def read(self) -> NDArray[Any]:
        """Return all values, in memory of their own."""
        return np.fromfile(self._path, self._dtype) if self._path.exists() else np.zeros(0, self._dtype)


def numbered(values: NDArray[Any]) -> NDArray[np.int32]:
    """Return for each value the number of smaller different ones, as `np.unique` does with three times the memory."""
    order = np.argsort(values)
    number = np.cumsum(_is_new(values[order]), dtype=np.int32) - np.int32(1)
    found = np.empty(len(values), dtype=np.int32)
    found[order] = number
    return found


def first_of_equal(values: NDArray[Any]) -> NDArray[np.int32]:
    """Return for each value the first place at which it stands."""
    order = np.argsort(values, kind="stable").astype(np.int32)
    starts = np.flatnonzero(_is_new(values[order]))
    found = np.empty(len(values), dtype=np.int32)
    found[order] = np.repeat(order[starts], np.diff(np.append(starts, len(values))))
    return found


def _is_new(ordered: NDArray[Any]) -> NDArray[np.bool_]:
    return np.concatenate([np.ones(len(ordered[:1]), dtype=bool), ordered[1:] != ordered[:-1]])
