"""Which of the prepared rows a data set has, and what there is to say of them.

This takes a few numbers of each row: a data set has them from the rows' file, an inspection from what it kept.

Shapes:  F = rows in the file.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import datasets
import numpy as np
from numpy.typing import NDArray

from openkto.data import truncation as rule
from openkto.data.contradictions import contradictions
from openkto.data.prepare import Prepared
from openkto.data.prepared_rows import PreparedRows
from openkto.data.problems import data_error
from openkto.data.report import DataReport
from openkto.errors import ConfigError, DataError


class Columns(NamedTuple):
    """What is known of each row besides its tokens, [F], in the order of the file."""

    numbers: NDArray[np.int64]
    labels: NDArray[np.bool_]
    weighs: NDArray[np.bool_]  # whether its weight is above 0
    prompt_lengths: NDArray[np.int32]
    completion_lengths: NDArray[np.int32]
    prompt_keys: NDArray[Any]  # a whole number from 0 for each different one
    completion_keys: NDArray[Any]

    def of(self, is_meant: NDArray[np.bool_]) -> "Columns":
        """Return those of some rows."""
        return Columns(**{name: values[is_meant] for name, values in self._asdict().items()})


@dataclass(frozen=True)
class ChosenRows:
    """The rows of a data set.

    Args:
        index: their places in the file, in the order in which they are mixed; a row may stand there more than once.
        left_out: [F], whether a row is too long.
    """

    index: NDArray[np.int64]
    left_out: NDArray[np.bool_]
    report: DataReport


def choose_rows(
    prepared: PreparedRows,
    columns: Columns,
    is_own: NDArray[np.bool_] | None,
    *,
    limit: rule.Limit,
    probs: Sequence[float] | None,
    seed: int,
) -> ChosenRows:
    """Leave out what is too long or another set's, and mix the sources.

    Args:
        is_own: [F], which rows may be this set's; None is all.
        probs: how often each source is drawn; None puts them one after the other.

    Raises:
        DataError: nothing is left.
        ConfigError: `probs` does not go with the sources.
    """
    if probs is not None and len(probs) != len(prepared.sources):
        raise ConfigError(
            f"dataset_probs: must have one number for each dataset; got {len(probs)} for {len(prepared.sources)}."
            " Give as many as there are."
        )
    prompts, completions = columns.prompt_lengths, columns.completion_lengths
    left_out = rule.is_left_out(prompts, completions, **limit._asdict())
    is_own = np.ones(len(left_out), dtype=bool) if is_own is None else is_own
    is_kept, starts = is_own & ~left_out, np.cumsum([0, *prepared.counts.rows_of_sources])
    kept = [begin + np.flatnonzero(is_kept[begin:end]) for begin, end in pairwise(starts)]
    for found, rows, (begin, end) in zip(prepared.sources, kept, pairwise(starts), strict=True):
        if len(rows) == 0 and (probs is not None or not is_kept.any()):
            own = begin + np.flatnonzero(is_own[begin:end])
            raise _none_fits(found.name, prompts[own], completions[own], limit)
    index = np.concatenate(kept) if probs is None else _mix(kept, probs, seed)
    if not columns.weighs[index].any():
        raise data_error(prepared.name, "at least one row must weigh more than 0", "0 for all", "Correct the weights.")
    return ChosenRows(index, left_out, _report(prepared.counts, columns, index, is_own, left_out, limit.max_len))


def _report(
    counts: Prepared,
    columns: Columns,
    index: NDArray[np.int64],
    is_own: NDArray[np.bool_],
    left_out: NDArray[np.bool_],
    max_len: int,
) -> DataReport:
    labels = columns.labels
    is_cut = (columns.prompt_lengths + columns.completion_lengths > max_len)[index]
    own = columns if is_own.all() else columns.of(is_own)
    return DataReport(
        rows_read=counts.rows_read,
        kept=len(index),
        desirable=int(labels[index].sum()),
        undesirable=int((~labels[index]).sum()),
        cut_desirable=int((is_cut & labels[index]).sum()),
        cut_undesirable=int((is_cut & ~labels[index]).sum()),
        left_out_desirable=int((left_out & is_own & labels).sum()),
        left_out_undesirable=int((left_out & is_own & ~labels).sum()),
        skipped=counts.skipped,
        first_skipped=counts.first_skipped,
        merged=counts.merged,
        template_differs=counts.template_differs,
        special_markup=counts.special_markup,
        notes=counts.notes,
        unlabelled=counts.unlabelled,
        findings=counts.findings,
        unread=counts.unread,
        contradicting=contradictions(own.numbers, own.prompt_keys, own.completion_keys, own.labels),
    )


def _none_fits(
    name: str, prompt_lengths: NDArray[np.int32], completion_lengths: NDArray[np.int32], limit: rule.Limit
) -> DataError:
    """Return the error where --max_len leaves nothing of a source, with the length that would leave some."""
    if len(prompt_lengths) == 0:
        what = "bad rows only, or rows that are held out"
        return data_error(name, "at least one row must be left", what, "Look at them, or leave it out.")
    totals = prompt_lengths + completion_lengths
    return data_error(
        name,
        f"at least one row must fit max_len {limit.max_len} with --truncation {limit.truncation}",
        f"none of {len(totals)} rows: the shortest has {totals.min()} tokens, the median {int(np.median(totals))}, "
        f"and the shortest prompt {prompt_lengths.min()}",
        "Raise --max_len, or change --truncation.",
    )


def _mix(kept: list[NDArray[np.int64]], probs: Sequence[float], seed: int) -> NDArray[np.int64]:
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
