"""What is kept of each row as it passes: some numbers a row in memory, its words in a file."""

import json
import re
from array import array
from collections import Counter
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from openkto.data.messages import Message
from openkto.data.notes import INFORMATION, WARNINGS
from openkto.data.problems import BadRow
from openkto.data.row import Row
from openkto.data.row_texts import text_of
from openkto.data.tokenize import TokenizedRow
from openkto.inspection.words import WordFile

# How transcripts and other models' templates mark whose turn it is, at the start of a line or as a token.
TRANSCRIPT = re.compile(r"(?im)^\s*(?:#+\s*)?(?:user|human|assistant|instruction|response|q|a)\s*:")
MARKUP = re.compile(r"<\|im_start\|>|<\|start_header_id\|>|\[INST\]|<start_of_turn>|<\|(?:user|assistant|system)\|>")
LEAST_TURNS = 2  # lines that begin so
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
    "looks like a chat",
    "foreign markup",
)
BIT = {kind: 1 << number for number, kind in enumerate(KINDS)}
FIRST_ROWS = 5  # of a kind that are shown


class SeenRows:
    """The rows of a pass, in the order in which they are written.

    Args:
        folder: where the words go.
        listed: the file that names every row there is something to say of, a JSON object a line.
    """

    def __init__(self, tokenizer: Any, folder: Path, listed: TextIO) -> None:
        special = (tokenizer.eos_token_id, tokenizer.bos_token_id)
        self._unknown = tokenizer.unk_token_id if tokenizer.unk_token_id not in special else None
        self._eos, self._bos = special
        self._listed = listed
        self.prompts, self.completions = WordFile(folder / "prompts"), WordFile(folder / "completions")
        self.bad: Counter[str] = Counter()
        self.first_bad: dict[str, list[str]] = {}
        self._columns: dict[str, list[NDArray[Any]]] = {}
        self._prefixes: dict[str, int] = {}
        self._heads: list[str] = []  # the same, by their numbers
        self._prefix, self._line = array("i"), array("q")

    def see(self, rows: list[tuple[int, Row, TokenizedRow]], written: pa.RecordBatch) -> None:
        """Keep what is needed of some rows."""
        flags = []
        for _, row, tokens in rows:
            flags.append(sum(BIT[kind] for kind in self._kinds_of(row, tokens)))
            self.prompts.add(text_of(row.prompt))
            self.completions.add(text_of(row.completion))
            self._keep_place(row.place)
        self._keep("flags", np.array(flags, dtype=np.int64))
        self._keep("number", written.column("row").to_numpy())
        self._keep("label", written.column("label").to_numpy(zero_copy_only=False))
        for part in ("prompt", "completion"):
            self._keep(f"{part}_length", written.column(f"{part}_ids").value_lengths().to_numpy())
            digests = b"".join(written.column(f"{part}_key").to_pylist())
            # Half of a digest tells a million texts apart: two are mistaken for one with a chance of 3 in 10^8.
            self._keep(f"{part}_key", np.frombuffer(digests, dtype=np.int64).reshape(-1, 2)[:, 0].copy())

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
        """Return what was kept of all rows: number, label, flags, a length in tokens or the key of a text."""
        parts = self._columns.get(name)
        if parts is None:
            return np.zeros(0, dtype=bool if name == "label" else np.int64)
        self._columns[name] = parts = [np.concatenate(parts)]
        return parts[0]

    def rows_of(self, kind: str) -> NDArray[np.int64]:
        """Return the rows that a kind holds for."""
        return np.flatnonzero(self.column("flags") & BIT[kind])

    def place(self, row: int) -> str:
        """Return a row's place in its file, as errors name it."""
        line = self._line[row]
        return f"{self._heads[self._prefix[row]]}{line if line >= 0 else ''}"

    def _keep(self, name: str, values: NDArray[Any]) -> None:
        self._columns.setdefault(name, []).append(values)

    def _keep_place(self, place: str) -> None:
        head = place.rstrip("0123456789")
        digits = place[len(head) :]
        is_number = digits.isascii() and bool(digits) and str(int(digits[:18])) == digits
        if not is_number:
            head = place
        if head not in self._prefixes:
            self._prefixes[head] = len(self._heads)
            self._heads.append(head)
        self._prefix.append(self._prefixes[head])
        self._line.append(int(digits) if is_number else -1)

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
        kinds |= {kind for kind, holds in is_said.items() if holds}
        if "already rendered" not in kinds and "wrapped twice" not in kinds:
            kinds |= _chat_in(row.prompt, is_plain="no template" in kinds)
        return kinds


def _chat_in(prompt: str | list[Message], is_plain: bool) -> set[str]:
    """Return what a prompt's text shows of a chat that no template has written."""
    text = text_of(prompt)
    found = {"foreign markup"} if MARKUP.search(text) else set()
    if is_plain and (found or len(TRANSCRIPT.findall(text)) >= LEAST_TURNS):
        return {"looks like a chat"}
    return found
