"""--eval_fraction: the rows that a run holds out, and those that another run held out; this needs no model."""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from openkto.commands.rows import read_rows
from openkto.config import RunConfig, settings_for, with_resolved
from openkto.data.dataset import UnpairedPreferenceDataset
from openkto.data.holdout import HeldOut, SplitFile
from openkto.data.report import DataReport

log = logging.getLogger(__name__)

HELD_OUT = "held_out"  # the name of the evaluation set


def held_out(config: RunConfig, *, is_training: bool) -> HeldOut | None:
    """Return one side of --eval_fraction; None where nothing is held out."""
    fraction = config.data.eval_fraction
    return None if fraction is None else HeldOut(fraction, config.train.seed, is_training)


def missing_classes(report: DataReport) -> list[str]:
    """Return the names of the classes that no row is of."""
    counts = {"desirable": report.desirable, "undesirable": report.undesirable}
    return [kind for kind, count in counts.items() if count == 0]


def warn_of_missing_classes(report: DataReport) -> None:
    """Say which class no held-out row has; that training rows lack one is said with the classes' weights."""
    for kind in missing_classes(report):
        log.warning(
            "warning: --eval_fraction: none of the held-out rows is %s, so rewards/auc and rewards/margins have no "
            "value. Raise it, or change --seed.",
            kind,
        )


def split_of(config: RunConfig, rows: UnpairedPreferenceDataset) -> SplitFile:
    """Return what is written down of a run's held-out rows."""
    data = config.data
    assert data.eval_fraction is not None, "rows are held out"
    order = np.argsort(rows.rows, kind="stable")
    digests = rows.prompt_digests()
    return SplitFile(
        seed=config.train.seed,
        fraction=data.eval_fraction,
        rows=rows.rows[order].tolist(),
        prompts=[digests[i].tobytes().hex() for i in order],
        **settings_for(SplitFile, data),
    )


def rows_of_split(
    split: SplitFile, config: RunConfig, tokenizer: Any, end_token_ids: Sequence[int]
) -> UnpairedPreferenceDataset:
    """Return the rows that a run held out."""
    which = {name: vars(split)[name] for name in ("dataset_config", "dataset_revision", "max_samples", "on_bad_rows")}
    return read_rows(
        split.dataset,
        split.dataset_split,
        with_resolved(config, **which),
        tokenizer,
        None,
        end_token_ids,
        choice=split,
    )
