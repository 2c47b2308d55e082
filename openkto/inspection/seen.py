"""What is kept of each row as it passes: some numbers and its words, all in files until they are needed."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TextIO

import numpy as np
import pyarrow as pa
from numpy.typing import DTypeLike, NDArray

from openkto.data.chosen_rows import Columns
from openkto.data.holdout import DIGEST, digests_in, halves
from openkto.data.notes import INFORMATION, WARNINGS
from openkto.data.problems import BadRow
from openkto.data.row import Row
from openkto.data.row_texts import text_of
from openkto.data.tokenize import TokenizedRow
from openkto.inspection.column import Column, numbered
from openkto.inspection.words import WordFile

KINDS = (
    *WARNINGS,
    *INFORMATION,
    "boundary merged",
    "template differs",
    "special markup",
    "unknown tokens",
    "begins with BOS",
    "ends with EOS",
    "no template",
)
BIT = {kind: 1 << number for number, kind in enumerate(KINDS)}
FIRST_ROWS = 5  # of a kind that are shown
# What is kept of a row, and as what number.
KEPT: dict[str, DTypeLike] = {
    "flags": np.uint32,
    "number": np.int64,
    "label": np.bool_,
    "weighs": np.bool_,
    "prompt_length": np.int32,
    "completion_length": np.int32,
    "prompt_key": np.int64,
    "completion_key": np.int64,
    "digest": DIGEST,
    "head": np.int32,
    "line": np.int64,
}


class SeenRows:
    """The rows of a pass, in the order in which they are written.

    Args:
        folder: where the numbers and words go.
        listed: the file that names every row there is something to say of, a JSON object a line.
    """

    def __init__(self, tokenizer: Any, folder: Path, listed: TextIO) -> None:
        special = (tokenizer.eos_token_id, tokenizer.bos_token_id)
        self._unknown = tokenizer.unk_token_id if tokenizer.unk_token_id not in special else None
        self._eos, self._bos = special
        self._listed = listed
        self.folder = folder
        self.prompts, self.completions = WordFile(folder / "prompts"), WordFile(folder / "completions")
        self.bad: Counter[str] = Counter()
        self.first_bad: dict[str, list[str]] = {}
        self._columns = {name: Column(folder / f"column-{name}", dtype) for name, dtype in KEPT.items()}
        self._heads: dict[str, int] = {}  # what stands before the number in a row's place: as many as there are files

    def see(self, rows: list[tuple[int, Row, TokenizedRow]], written: pa.RecordBatch) -> None:
        """Keep what is needed of some rows."""
        self.prompts.add([text_of(row.prompt) for _, row, _ in rows])
        self.completions.add([text_of(row.completion) for _, row, _ in rows])
        places = [_parted(row.place) for _, row, _ in rows]
        flags = [sum(BIT[kind] for kind in self._kinds_of(row, tokens)) for _, row, tokens in rows]
        kept: dict[str, NDArray[Any]] = {
            "flags": np.array(flags),
            "number": written.column("row").to_numpy(),
            "label": written.column("label").to_numpy(zero_copy_only=False),
            "weighs": written.column("weight").to_numpy() > 0,
            "digest": digests_in(written),
            "head": np.array([self._heads.setdefault(head, len(self._heads)) for head, _ in places]),
            "line": np.array([line for _, line in places]),
        }
        for part in ("prompt", "completion"):
            kept[f"{part}_length"] = written.column(f"{part}_ids").value_lengths().to_numpy()
            keys = b"".join(written.column(f"{part}_key").to_pylist())
            kept[f"{part}_key"] = halves(np.frombuffer(keys, dtype=DIGEST))
        for name, values in kept.items():
            self._columns[name].add(values)

    def see_bad(self, bad: BadRow) -> None:
        """Write a bad row down."""
        self.bad[bad.kind] += 1
        text = bad.when_skipped()
        first = self.first_bad.setdefault(bad.kind, [])
        if len(first) < FIRST_ROWS:
            first.append(text)
        self.list_row(bad.kind, text.partition(": ")[0], text)

    def list_row(self, kind: str, place: str, text: str) -> None:
        """Name a row in the file of all rows that there is something to say of."""
        self._listed.write(json.dumps({"kind": kind, "place": place, "text": text}, ensure_ascii=False) + "\n")

    def column(self, name: str) -> NDArray[Any]:
        """Return what was kept of all rows under one of the names of `KEPT`."""
        return self._columns[name].read()

    def keys(self, part: Literal["prompt", "completion"]) -> NDArray[np.int32]:
        """Return a number from 0 for each different prompt or completion."""
        return numbered(self.column(f"{part}_key"))

    def columns(self) -> Columns:
        """Return what is needed to choose rows."""
        return Columns(
            numbers=self.column("number"),
            labels=self.column("label"),
            weighs=self.column("weighs"),
            prompt_lengths=self.column("prompt_length"),
            completion_lengths=self.column("completion_length"),
            prompt_keys=self.keys("prompt"),
            completion_keys=self.keys("completion"),
        )

    def places(self) -> Callable[[int], str]:
        """Return what names a row's place in its file, as errors do."""
        head, line, heads = self.column("head"), self.column("line"), list(self._heads)
        return lambda row: f"{heads[head[row]]}{line[row] if line[row] >= 0 else ''}"

    def _kinds_of(self, row: Row, tokens: TokenizedRow) -> set[str]:
        kinds: set[str] = set(tokens.notes)
        is_said = {
            "boundary merged": tokens.is_merged,
            "template differs": tokens.template_differs,
            "special markup": tokens.has_special_markup,
            "unknown tokens": self._unknown is not None
            and (self._unknown in tokens.prompt_ids or self._unknown in tokens.completion_ids),
            "begins with BOS": self._bos is not None and tokens.prompt_ids[0] == self._bos,
            "ends with EOS": self._eos is not None and tokens.completion_ids[-1] == self._eos,
            "no template": isinstance(row.prompt, str) and "already rendered" not in kinds,
        }
        return kinds | {kind for kind, holds in is_said.items() if holds}


def _parted(place: str) -> tuple[str, int]:
    """Return a place as its text and the number at its end, -1 where there is none."""
    head = place.rstrip("0123456789")
    digits = place[len(head) :]
    is_number = digits.isascii() and bool(digits) and str(int(digits[:18])) == digits
    return (head, int(digits)) if is_number else (place, -1)
