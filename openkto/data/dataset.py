"""The dataset that training and evaluation read: tokenised labelled rows on a memory-mapped Arrow file."""

import datetime
import hashlib
import logging
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import datasets
import numpy as np
import pyarrow.compute as pc

from openkto.config.data_checks import check_template
from openkto.data import truncation as rule
from openkto.data.cache import ROWS_FILE, cache_folder, cache_key, cached_folder
from openkto.data.contradictions import contradictions
from openkto.data.holdout import RowChoice
from openkto.data.prepare import Preparation, Prepared, RowWatch, load_prepared
from openkto.data.preview import preview_rows
from openkto.data.problems import data_error
from openkto.data.report import DataReport, say
from openkto.data.row import RowSettings
from openkto.data.sources import Source, SourceSettings, find_sources
from openkto.data.template import uses_date
from openkto.data.tokenize import choose_pad_token
from openkto.errors import ConfigError, DataError

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
        watch: is shown each row as it is read; cached rows are then read again.

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
        watch: RowWatch | None = None,
    ) -> None:
        settings, place = row_settings or RowSettings(), source_settings or SourceSettings()
        date = settings.template_date or datetime.date.today().isoformat()
        settings = replace(settings, template_date=date if uses_date(tokenizer) else None)
        _check_settings(settings, max_len)
        self.tokenizer = tokenizer
        self.max_len = max_len
        self._fingerprint: str | None = None  # once asked for: it takes a second for a gigabyte of tokens
        self.truncation: rule.Truncation = truncation
        self.bos_token_id: int | None = tokenizer.bos_token_id
        self.pad_token_id, pad_name = choose_pad_token(tokenizer)
        if pad_name != "pad_token":
            logger.info("the tokenizer has no pad token: %s (id %d) pads", pad_name, self.pad_token_id)
        sources = find_sources(source, place.split, place.subset, place.revision, cache_dir)
        self.name = ", ".join(found.name for found in sources)
        if dataset_probs is not None and len(dataset_probs) != len(sources):
            raise ConfigError(
                f"dataset_probs: must have one number for each dataset; got {len(dataset_probs)} for {len(sources)}."
                " Give as many as there are."
            )

        def build(folder: Path) -> None:
            preparation = Preparation(
                tokenizer,
                settings,
                max_samples=place.max_samples,
                on_bad_rows=on_bad_rows,
                end_token_ids=end_token_ids,
                watch=watch,
            )
            preparation.write(sources, folder)

        key = cache_key(
            [found.digest() for found in sources],
            tokenizer,
            {
                **asdict(settings),
                "end_token_ids": list(end_token_ids),
                "max_samples": place.max_samples,
                "on_bad_rows": on_bad_rows,
                "keys": [found.settings for found in sources],
            },
        )
        folder = cached_folder(cache_folder(cache_dir), key, build, always_builds=watch is not None)
        self._file = folder / ROWS_FILE
        self._open(load_prepared(folder), sources, dataset_probs, seed, place.choice)

    def _open(
        self,
        prepared: Prepared,
        sources: list[Source],
        probs: Sequence[float] | None,
        seed: int,
        choice: RowChoice | None,
    ) -> None:
        """Map the prepared rows into memory, leave out what is too long or another set's, and mix."""
        stored = datasets.Dataset.from_file(str(self._file))
        table = stored.data
        labels = table.column("label").to_numpy()
        weights = table.column("weight").to_numpy()
        prompt_lengths = pc.list_value_length(table.column("prompt_ids")).to_numpy()
        completion_lengths = pc.list_value_length(table.column("completion_ids")).to_numpy()
        left_out = rule.is_left_out(
            prompt_lengths, completion_lengths, max_len=self.max_len, truncation=self.truncation
        )
        numbers, is_own = table.column("row").to_numpy(), np.ones(len(labels), dtype=bool)
        if choice is not None:
            is_own = choice.mask(self.name, numbers, table.column("prompt_digest").to_pylist())
        is_kept, starts = is_own & ~left_out, np.cumsum([0, *prepared.rows_of_sources])
        kept = [begin + np.flatnonzero(is_kept[begin:end]) for begin, end in pairwise(starts)]
        for found, rows, (begin, end) in zip(sources, kept, pairwise(starts), strict=True):
            if len(rows) == 0 and (probs is not None or not is_kept.any()):
                own = begin + np.flatnonzero(is_own[begin:end])
                raise self._none_fits(found.name, prompt_lengths[own], completion_lengths[own])
        self._index = np.concatenate(kept) if probs is None else _mix(kept, probs, seed)
        # The digests stand in the file; equal numbers, counted by first appearance, are enough once it is open.
        keys = {
            name: table.column(name).combine_chunks().dictionary_encode().indices.to_numpy().astype(np.int64)
            for name in ("prompt_key", "completion_key")
        }
        self._rows = stored.remove_columns([*keys, "prompt_digest"])
        self.rows: np.ndarray = numbers[self._index]
        self.labels: np.ndarray = labels[self._index]
        self.weights: np.ndarray = weights[self._index]
        self.prompt_keys: np.ndarray = keys["prompt_key"][self._index]
        self.completion_keys: np.ndarray = keys["completion_key"][self._index]
        self.prompt_lengths: np.ndarray = prompt_lengths[self._index]
        self.completion_lengths: np.ndarray = completion_lengths[self._index]
        if not self.weights.any():
            raise data_error(self.name, "at least one row must weigh more than 0", "0 for all", "Correct the weights.")
        is_cut = self.prompt_lengths + self.completion_lengths > self.max_len
        self.report = DataReport(
            rows_read=prepared.rows_read,
            kept=len(self._index),
            desirable=int(self.labels.sum()),
            undesirable=int((~self.labels).sum()),
            cut_desirable=int((is_cut & self.labels).sum()),
            cut_undesirable=int((is_cut & ~self.labels).sum()),
            left_out_desirable=int((left_out & is_own & labels).sum()),
            left_out_undesirable=int((left_out & is_own & ~labels).sum()),
            skipped=prepared.skipped,
            first_skipped=prepared.first_skipped,
            merged=prepared.merged,
            template_differs=prepared.template_differs,
            special_markup=prepared.special_markup,
            notes=prepared.notes,
            unlabelled=prepared.unlabelled,
            findings=prepared.findings,
            unread=prepared.unread,
            contradicting=contradictions(
                numbers[is_own], keys["prompt_key"][is_own], keys["completion_key"][is_own], labels[is_own]
            ),
        )
        say(self.report, self.max_len, with_source=choice is None or choice.is_said)

    def _none_fits(self, name: str, prompt_lengths: np.ndarray, completion_lengths: np.ndarray) -> DataError:
        """Return the error where --max_len leaves nothing of a source, with the length that would leave some."""
        if len(prompt_lengths) == 0:
            what = "bad rows only, or rows that are held out"
            return data_error(name, "at least one row must be left", what, "Look at them, or leave it out.")
        totals = prompt_lengths + completion_lengths
        return data_error(
            name,
            f"at least one row must fit max_len {self.max_len} with --truncation {self.truncation}",
            f"none of {len(totals)} rows: the shortest has {totals.min()} tokens, the median {int(np.median(totals))}, "
            f"and the shortest prompt {prompt_lengths.min()}",
            "Raise --max_len, or change --truncation.",
        )

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

    def prompt_digests(self) -> list[bytes]:
        """Return what tells each row's prompt from others, whatever tokenizer and template it went through."""
        digests = datasets.Dataset.from_file(str(self._file)).data.column("prompt_digest").to_pylist()
        return [digests[i] for i in self._index.tolist()]

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
        return preview_rows(self, n, has_colour)


def _check_settings(settings: RowSettings, max_len: int) -> None:
    if max_len < rule.SMALLEST_MAX_LEN:
        raise ConfigError(
            f"max_len: must be at least {rule.SMALLEST_MAX_LEN} (BOS, prompt and completion token); got {max_len}."
            " Raise it."
        )
    check_template("input_template", settings.input_template, settings.apply_chat_template)


def _mix(kept: list[np.ndarray], probs: Sequence[float], seed: int) -> np.ndarray:
    """Return positions drawn from the sources by probability until each of them has been used up once."""
    total = sum(probs)
    if min(probs) <= 0:
        raise ConfigError(f"dataset_probs: must all be above 0; got {list(probs)}. Leave the dataset out instead.")
    mixed = datasets.interleave_datasets(
        [datasets.Dataset.from_dict({"position": rows}) for rows in kept],
        probabilities=[prob / total for prob in probs],
        seed=seed,
        stopping_strategy="all_exhausted",
    )
    return np.asarray(mixed["position"], dtype=np.int64)
