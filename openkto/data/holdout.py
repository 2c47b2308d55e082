"""Rows that are held out of training to evaluate on: which they are, and the file that says so.

A row is held out or not by its prompt and the seed only: a resumed run, another rank, another tokenizer, --max_len or
--max_samples, and rows that are added move none. Rows that share a prompt stay together.
"""

import hashlib
import json
import unicodedata
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from openkto.data.messages import Message
from openkto.data.problems import data_error
from openkto.errors import DataError
from openkto.masking import is_masked, masked_value

SPLIT_FILE = "eval_split.json"
DIGEST_BYTES = 16
DIGEST = np.dtype(f"V{DIGEST_BYTES}")
SHOWN = 5  # rows that an error names


class RowChoice(Protocol):
    """Says which of a data set's rows are meant."""

    @property
    def is_said(self) -> bool:
        """Whether what there is to say of the whole data set is said with these rows."""
        ...

    def mask(self, name: str, rows: NDArray[np.int64], digests: NDArray[np.void]) -> NDArray[np.bool_]:
        """Return which rows are meant, [n], by their numbers and their prompts' digests."""


def prompt_digest(prompt: str | list[Message]) -> bytes:
    """Return what two prompts have in common when they ask the same.

    Case, white space and compatible forms of a character make no difference, nor does it whether a text is a prompt by
    itself or the only message.
    """
    if not isinstance(prompt, str) and len(prompt) == 1 and isinstance(prompt[0]["content"], str):
        prompt = prompt[0]["content"]
    if isinstance(prompt, str):
        text = _plain(prompt)
    else:
        parts = [{name: _plain(v) if isinstance(v, str) else v for name, v in message.items()} for message in prompt]
        text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES).digest()


def digests_in(table: Any) -> NDArray[np.void]:
    """Return the digests of the rows' prompts in a table, or in a record batch, of prepared rows."""
    column = table.column("prompt_digest")
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    return np.concatenate(
        [np.frombuffer(chunk.buffers()[1], DIGEST, len(chunk), chunk.offset * DIGEST_BYTES) for chunk in chunks]
    )


def halves(digests: NDArray[np.void]) -> NDArray[np.int64]:
    """Return the first half of each digest as a whole number, which is faster to compare, [n].

    It tells a million texts apart: two are mistaken for one with a chance of 3 in 10^8.
    """
    return digests.view(np.int64).reshape(-1, 2)[:, 0]


def count_prompts(digests: NDArray[np.void]) -> int:
    """Return how many different prompts there are."""
    return len(np.unique(halves(digests)))


def _plain(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def is_held_out(digest: bytes, fraction: float, seed: int) -> bool:
    """Return whether a prompt is held out: whether its hash with the seed, between 0 and 1, is below the fraction."""
    drawn = hashlib.blake2b(digest, digest_size=8, key=str(seed).encode()).digest()
    return int.from_bytes(drawn, "big") < fraction * 2**64


@dataclass(frozen=True)
class HeldOut:
    """One side of --eval_fraction: the rows that are held out, or the others."""

    fraction: float
    seed: int
    is_training: bool

    @property
    def is_said(self) -> bool:
        """What is said of all rows is said once, with those to train on."""
        return self.is_training

    def mask(self, name: str, rows: NDArray[np.int64], digests: NDArray[np.void]) -> NDArray[np.bool_]:
        """See `RowChoice`.

        Raises:
            DataError: one side has no row.
        """
        drawn = (is_held_out(digest.tobytes(), self.fraction, self.seed) for digest in digests)
        held_out = np.fromiter(drawn, dtype=bool, count=len(digests))
        if held_out.all() or not held_out.any():
            prompts = count_prompts(digests)
            rule = f"--eval_fraction {self.fraction:g} must leave a prompt to evaluate on and one to train on"
            got = f"{prompts if held_out.any() else 0} of {prompts} prompts held out"
            cure = "Change the fraction or --seed, or add rows." if prompts > 1 else "Add rows with other prompts."
            raise data_error(name, rule, got, cure)
        return ~held_out if self.is_training else held_out


@dataclass(frozen=True)
class SplitFile:
    """What a run wrote down of its held-out rows: their numbers and prompts, and what says which rows there are."""

    seed: int
    fraction: float
    dataset: list[str]
    dataset_split: str
    dataset_config: str | None
    dataset_revision: str | None
    max_samples: int
    on_bad_rows: str
    rows: list[int]
    prompts: list[str]  # each row's `prompt_digest`, in hexadecimal
    is_said = True

    def to_json(self) -> str:
        """Return the file's text, in which an address of the rows has no key."""
        return json.dumps({name: masked_value(value) for name, value in asdict(self).items()}) + "\n"

    def mask(self, name: str, rows: NDArray[np.int64], digests: NDArray[np.void]) -> NDArray[np.bool_]:
        """See `RowChoice`.

        Raises:
            DataError: a row has another prompt than it had, or is not there.
        """
        wanted = dict(zip(self.rows, self.prompts, strict=True))
        every = zip(rows.tolist(), digests, strict=True)
        found = {row: digest.tobytes().hex() for row, digest in every if row in wanted}
        others = [row for row, prompt in wanted.items() if found.get(row) != prompt]
        if others:
            shown = ", ".join(map(str, others[:SHOWN])) + (" and more" if len(others) > SHOWN else "")
            got = f"other or no prompts in rows {shown}, {len(others)} of {len(wanted)}"
            rule = f"must hold the rows that {SPLIT_FILE} names"
            raise data_error(name, rule, got, "Give the data that the run held them out of.")
        return np.isin(rows, self.rows)


def read_split(path: str) -> SplitFile | None:
    """Return what a run's eval_split.json says; None where a path is not that of one.

    Raises:
        DataError: the file is not one that a run wrote.
    """
    file = Path(path).expanduser()
    if file.name != SPLIT_FILE or not file.is_file():
        return None
    try:
        split = _checked(SplitFile(**json.loads(file.read_text(encoding="utf-8"))))
    except (OSError, ValueError, TypeError, RecursionError):
        raise _no_split(path) from None
    lacking = next((entry for entry in split.dataset if is_masked(entry)), None)
    if lacking is not None:
        got = f"{lacking}, whose password or key was left out when it was written down"
        cure = "Write the whole address, or the path of a copy of the rows, into a copy of the file."
        raise data_error(path, "its dataset must be whole addresses", got, cure)
    return split


def _checked(split: SplitFile) -> SplitFile:
    """Return it where its members are what they should be; raises ValueError."""
    lists: list[tuple[Any, type]] = [(split.dataset, str), (split.rows, int), (split.prompts, str)]
    is_good = all(isinstance(members, list) and all(type(m) is kind for m in members) for members, kind in lists)
    if not is_good or len(split.rows) != len(split.prompts) or type(split.max_samples) is not int:
        raise ValueError
    return split


def _no_split(path: str) -> DataError:
    return data_error(
        path, "must be the file of held-out rows that a run with --eval_fraction wrote", "another", "Name another file."
    )
