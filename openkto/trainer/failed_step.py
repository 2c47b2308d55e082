"""Writes a small JSON file when a step fails, with everything needed to repeat the step.

Shapes:  L = rows on this rank, N = rows in the global batch (all ranks).
Units:   nats.
"""

import json
import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from openkto.batches.loader import RankBatch
from openkto.batches.micro_batch import TokenRows
from openkto.errors import TrainingError
from openkto.trainer.forwards import BeforeBackward
from openkto.trainer.protocols import Strategy
from openkto.trainer.rows import Columns, gather_columns
from openkto.trainer.run_state import RunState

log = logging.getLogger(__name__)


def facts_of(run: RunState, learning_rate: float, dtype: torch.dtype, error: TrainingError) -> dict[str, Any]:
    """Return what `write_failed_step` says of a step before its rows."""
    return {
        "step": run.step,
        "updates_before": run.updates,
        "dtype": str(dtype),
        "learning_rate": learning_rate,
        "shift": run.shift,
        "error": str(error),
    }


def write_failed_step(
    folder: Path,
    strategy: Strategy,
    rows: TokenRows,
    batch: RankBatch,
    parts: list[Columns],
    before: BeforeBackward,
    facts: dict[str, Any],
) -> None:
    """Write `failed_step<N>.json` on rank 0, and say so; all ranks must call it.

    Args:
        rows: the training rows.
        parts: what `row_columns` made of each matched micro-batch.
        facts: see `facts_of`.
    """
    columns = gather_columns(strategy, batch, parts)
    pairs_N2 = strategy.gather_rows(before.mismatched_rows)
    place_of = {int(row): i for i, row in enumerate(rows.rows)}
    completion_of = dict(zip(batch.rows.tolist(), batch.kl_rows.tolist(), strict=False))
    content = facts | {
        "z_ref": _number(float(before.z_ref)),
        "mismatched_mean": None if before.mismatched_mean is None else _number(float(before.mismatched_mean)),
        "rows": [
            {name: _number(column[n]) for name, column in columns.items()}
            | {
                "prompt_tokens": int(rows.prompt_lengths[place_of[int(row)]]),
                "completion_tokens": int(rows.completion_lengths[place_of[int(row)]]),
            }
            for n, row in enumerate(columns["row"])
        ],
        "mismatched_pairs": [
            {"prompt_of": int(row), "completion_of": completion_of[int(row)], "log_ratio": _number(log_ratio)}
            for row, log_ratio in pairs_N2[pairs_N2[:, 0] >= 0]
        ],
    }
    path = folder / f"failed_step{facts['step']}.json"
    if strategy.rank == 0:
        try:
            path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
            log.warning("warning: %s has the rows of the step that failed, their lengths and all terms.", path)
        except OSError as error:
            log.warning("warning: %s: could not be written (%s).", path, error.strerror)


def _number(value: float | np.floating) -> float | int | str:
    """Return a number for JSON, which has no word for one that is not finite."""
    value = float(value)
    if not math.isfinite(value):
        return str(value)
    return int(value) if value.is_integer() else value
