"""The dataset that training and evaluation read: tokenised labelled rows on a memory-mapped Arrow file."""

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import datasets
import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from openkto.data import truncation as rule
from openkto.data.chosen_rows import Columns, choose_rows
from openkto.data.holdout import RowChoice, digests_in
from openkto.data.prepared_rows import PreparedRows, prepare_rows
from openkto.data.preview import first_of_each_class, preview_rows
from openkto.data.report import say
from openkto.data.row import RowSettings
from openkto.data.sources import SourceSettings
from openkto.data.tokenize import choose_pad_token
from openkto.errors import ConfigError

logger = logging.getLogger(__name__)


class UnpairedPreferenceDataset:
    """Tokenised labelled rows; indexable, sized, picklable. `name` is what they were read from.

    Args:
        source: a path, glob, `save_to_disk` folder or hub name; a list of such; or a list of rows (dicts).
        tokenizer: a Hugging Face tokenizer, with a chat template where rows hold messages.
        max_len: tokens of prompt and completion together; stored ids are uncut, `cut` cuts them.
        row_settings: how records become rows and texts; a source's own settings go over them.
        source_settings: which part of each source is read, and which of those rows are this data set's.
        dataset_probs: how often each source is drawn; None puts them one after the other.
        end_token_ids: where generation stops besides the tokenizer's EOS: generation_config's eos_token_id.
        cache_dir: where tokenised rows are kept; None is $OPENKTO_CACHE or ~/.cache/openkto.
        seed: of the mixing.

    Raises DataError for what is wrong with the data, ConfigError for settings that contradict each other.
    """

    def __init__(
        self,
        source: str | Path | Sequence[Any],
        tokenizer: Any,
        max_len: int = 2048,
        *,
        row_settings: RowSettings | None = None,
        source_settings: SourceSettings | None = None,
        dataset_probs: Sequence[float] | None = None,
        truncation: rule.Truncation = "completion",
        on_bad_rows: Literal["error", "skip"] = "error",
        end_token_ids: Sequence[int] = (),
        cache_dir: str | Path | None = None,
        seed: int = 42,
    ) -> None:
        if max_len < rule.SMALLEST_MAX_LEN:
            raise ConfigError(
                f"max_len: must be at least {rule.SMALLEST_MAX_LEN} (BOS, prompt and completion token); got {max_len}."
                " Raise it."
            )
        self.tokenizer = tokenizer
        self.max_len = max_len
        self._fingerprint: str | None = None  # once asked for: it takes a second for a gigabyte of tokens
        self.truncation: rule.Truncation = truncation
        self.bos_token_id: int | None = tokenizer.bos_token_id
        self.pad_token_id, pad_name = choose_pad_token(tokenizer)
        if pad_name != "pad_token":
            logger.info("the tokenizer has no pad token: %s (id %d) pads", pad_name, self.pad_token_id)
        place = source_settings or SourceSettings()
        prepared = prepare_rows(
            source,
            tokenizer,
            row_settings or RowSettings(),
            place,
            on_bad_rows=on_bad_rows,
            end_token_ids=end_token_ids,
            cache_dir=cache_dir,
        )
        self.name, self._file = prepared.name, prepared.file
        self._open(prepared, dataset_probs, seed, place.choice)

    def _open(self, prepared: PreparedRows, probs: Sequence[float] | None, seed: int, choice: RowChoice | None) -> None:
        """Map the prepared rows into memory, and choose this set's."""
        stored = datasets.Dataset.from_file(str(self._file))
        table = stored.data
        weights = table.column("weight").to_numpy()
        # The digests stand in the file; equal numbers, counted by first appearance, are enough once it is open.
        keys = {
            name: table.column(name).combine_chunks().dictionary_encode().indices.to_numpy().astype(np.int64)
            for name in ("prompt_key", "completion_key")
        }
        columns = Columns(
            numbers=table.column("row").to_numpy(),
            labels=table.column("label").to_numpy(),
            weighs=weights > 0,
            prompt_lengths=pc.list_value_length(table.column("prompt_ids")).to_numpy(),
            completion_lengths=pc.list_value_length(table.column("completion_ids")).to_numpy(),
            prompt_keys=keys["prompt_key"],
            completion_keys=keys["completion_key"],
        )
        is_own = None if choice is None else choice.mask(self.name, columns.numbers, digests_in(table))
        limit = rule.Limit(self.max_len, self.truncation)
        chosen = choose_rows(prepared, columns, is_own, limit=limit, probs=probs, seed=seed)
        self._index, self.report = chosen.index, chosen.report
        self._rows = stored.remove_columns([*keys, "prompt_digest"])
        self.weights: np.ndarray = weights[self._index]
        self.rows: np.ndarray = columns.numbers[self._index]
        self.labels: np.ndarray = columns.labels[self._index]
        self.prompt_keys: np.ndarray = columns.prompt_keys[self._index]
        self.completion_keys: np.ndarray = columns.completion_keys[self._index]
        self.prompt_lengths: np.ndarray = columns.prompt_lengths[self._index]
        self.completion_lengths: np.ndarray = columns.completion_lengths[self._index]
        say(self.report, self.max_len, with_source=choice is None or choice.is_said)

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return row, prompt_ids, completion_ids, completion_mask, label and weight of a row; its ids uncut."""
        return self._rows[int(self._index[index])]

    def cut(
        self, prompt_ids: list[int], completion_ids: list[int], completion_mask: list[bool]
    ) -> tuple[list[int], list[int], list[bool]]:
        """Return a matched or mismatched pair of this dataset's prompts and completions, cut to max_len."""
        return rule.cut(
            prompt_ids,
            completion_ids,
            completion_mask,
            max_len=self.max_len,
            truncation=self.truncation,
            bos_token_id=self.bos_token_id,
        )

    def cut_lengths(self, prompt_lengths: np.ndarray, completion_lengths: np.ndarray) -> np.ndarray:
        """Return the tokens of pairs after the cut, [n]."""
        kept = rule.kept_lengths(prompt_lengths, completion_lengths, max_len=self.max_len, truncation=self.truncation)
        return kept[0] + kept[1]

    def prompt_digests(self) -> NDArray[np.void]:
        """Return what tells each row's prompt from others, [n], whatever tokenizer and template it went through."""
        digests: NDArray[np.void] = digests_in(datasets.Dataset.from_file(str(self._file)).data)[self._index]
        return digests

    def longest_and_largest(self) -> tuple[int, int]:
        """Return the tokens of the longest sequence that any pairing can make, and the largest id in use."""
        longest = min(self.max_len, int(self.prompt_lengths.max()) + int(self.completion_lengths.max()))
        columns = [self._rows.data.column(name) for name in ("prompt_ids", "completion_ids")]
        return longest, max(pc.max(pc.list_flatten(column)).as_py() for column in columns)

    def last_scored_ids(self) -> np.ndarray:
        """Return the last scored token of each stored row, those that are too long for max_len among them."""
        found = [np.zeros(0, dtype=np.int64)]
        columns = [self._rows.data.column(name).chunks for name in ("completion_ids", "completion_mask")]
        for ids, mask in zip(*columns, strict=True):
            starts = ids.offsets.to_numpy()[:-1] - ids.offsets[0].as_py()
            scored = mask.flatten().to_numpy(zero_copy_only=False)
            last = np.maximum.reduceat(np.where(scored, np.arange(len(scored)), -1), starts)
            found.append(ids.flatten().to_numpy()[last].astype(np.int64))
        return np.concatenate(found)

    def fingerprint(self) -> str:
        """Return a hash of the rows in their order and of how they are cut: what training sees of the data."""
        if self._fingerprint is not None:
            return self._fingerprint
        digest = hashlib.sha256(repr((self.max_len, self.truncation, self.bos_token_id)).encode())
        lengths = (self.prompt_lengths, self.completion_lengths)
        for numbers in (self._index, self.rows, self.labels, self.weights, *lengths):
            digest.update(np.ascontiguousarray(numbers).tobytes())
        for name in ("prompt_ids", "completion_ids", "completion_mask"):
            for chunk in self._rows.data.column(name).chunks:
                digest.update(np.ascontiguousarray(chunk.flatten().to_numpy(zero_copy_only=False)).data)
        self._fingerprint = digest.hexdigest()[:16]
        return self._fingerprint

    def preview(self, n: int, has_colour: bool = False) -> str:
        """Return n rows of each class as the model sees them, with the scored part marked."""
        chosen = first_of_each_class(self.labels, n).tolist()
        return preview_rows([self[i] for i in chosen], self.tokenizer, self.cut, self.max_len, has_colour)
