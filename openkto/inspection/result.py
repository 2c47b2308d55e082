"""The whole of an inspection as plain values: what the table, the JSON and the page show."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from openkto.data import truncation as rule
from openkto.data.balance import LARGEST_RATIO, SMALLEST_RATIO, Weight, describe_balance, resolve_weights
from openkto.data.chosen_rows import ChosenRows
from openkto.data.holdout import count_prompts
from openkto.data.report import some_rows
from openkto.inspection.findings import Finding, gather
from openkto.inspection.seen import SeenRows

BINS = 30
FORMULA = (
    f"(desirable weight x desirable rows) / (undesirable weight x undesirable rows) in [{SMALLEST_RATIO:g}, "
    f"{LARGEST_RATIO:.4g}] (Ethayarajh et al., arXiv:2402.01306v1)"
)
CLASSES = {"desirable": True, "undesirable": False}


@dataclass(frozen=True)
class Inspection:
    """What was found; JSON-able through `dataclasses.asdict`."""

    name: str
    rows_read: int
    rows_kept: int
    classes: dict[str, int]
    formula: str
    balance: str  # the classes' ratio at the weights of the command line
    weights: dict[str, float]  # that bring the ratio to 1
    balance_warning: str | None
    held_out: str | None  # what --eval_fraction takes out of the training rows
    lengths: dict[str, dict[str, int]]  # by class: shortest, median, longest, ...; of --max_len
    histograms: list[dict[str, Any]]  # part, class, from, to, rows
    findings: list[Finding]
    label_measure: str
    unlabelled: dict[str, int]
    recognised: list[str]
    unread_fields: list[str]


def inspection_of(
    name: str,
    seen: SeenRows,
    chosen: ChosenRows,
    limit: rule.Limit,
    weights: tuple[Weight, Weight],
    held_out: ChosenRows | None = None,
) -> Inspection:
    """Return what there is to say of the rows that were seen, and of those of them that are trained on.

    Args:
        name: of the data set.
        weights: --desirable_loss_weight and --undesirable_loss_weight.
        held_out: the rows that are not trained on but evaluated on.
    """
    report, left_out = chosen.report, chosen.left_out
    counts = report.desirable, report.undesirable
    balance, warning = describe_balance(
        *resolve_weights(*weights, *counts), *counts, left_out=(report.left_out_desirable, report.left_out_undesirable)
    )
    smaller: tuple[Weight, Weight] = ("auto", 1.0) if counts[0] < counts[1] else (1.0, "auto")
    sides = None if held_out is None else describe_held_out(seen, chosen, held_out)
    lengths, histograms = _of_lengths(seen, left_out, limit)
    findings, label_measure = gather(seen, limit.max_len, left_out)
    return Inspection(
        name=name,
        rows_read=report.rows_read,
        rows_kept=report.kept,
        classes=dict(zip(CLASSES, counts, strict=True)),
        formula=FORMULA,
        balance=balance,
        weights=dict(zip(CLASSES, resolve_weights(*smaller, *counts), strict=True)),
        balance_warning=warning,
        held_out=sides,
        lengths=lengths,
        histograms=histograms,
        findings=findings,
        label_measure=label_measure,
        unlabelled=report.unlabelled,
        recognised=report.findings,
        unread_fields=report.unread,
    )


def describe_held_out(seen: SeenRows, training: ChosenRows, held_out: ChosenRows) -> str:
    """Say how many rows and prompts are on each side."""
    report, digests = held_out.report, seen.column("digest")
    sides = [np.unique(side.index) for side in (held_out, training)]
    prompts = [count_prompts(digests[rows]) for rows in sides]
    said = [
        f"{some_rows(len(rows))} of {count} prompt{'' if count == 1 else 's'}"
        for rows, count in zip(sides, prompts, strict=True)
    ]
    return (
        f"held out to evaluate on: {said[0]} ({report.desirable} desirable, {report.undesirable} undesirable); "
        f"left to train on: {said[1]}"
    )


def _of_lengths(
    seen: SeenRows, left_out: NDArray[np.bool_], limit: rule.Limit
) -> tuple[dict[str, dict[str, int]], list[dict[str, Any]]]:
    """Return the figures of the lengths by class, and their bars."""
    labels, prompts, completions = (seen.column(name) for name in ("label", "prompt_length", "completion_length"))
    figures = {}
    for name, label in CLASSES.items():
        rows = labels == label
        figures[name] = _lengths(prompts[rows], completions[rows], left_out[rows], limit)
    return figures, _histogram("prompt", prompts, labels) + _histogram("completion", completions, labels)


def _lengths(prompts: np.ndarray, completions: np.ndarray, left_out: np.ndarray, limit: rule.Limit) -> dict[str, int]:
    """Return a class's lengths in tokens before any cut, and what --max_len takes of it in rows and tokens."""
    total = prompts + completions
    kept = sum(rule.kept_lengths(prompts, completions, **limit._asdict()))
    is_cut = (total > limit.max_len) & ~left_out
    if not len(total):
        return {"rows": 0}
    return {
        "rows": len(total),
        "median prompt": int(np.median(prompts)),
        "median completion": int(np.median(completions)),
        "longest row": int(total.max()),
        "tokens": int(total.sum()),
        "rows cut": int(is_cut.sum()),
        "tokens cut": int((total - kept)[is_cut].sum()),
        "rows left out": int(left_out.sum()),
        "tokens left out": int(total[left_out].sum()),
    }


def _histogram(part: str, lengths: np.ndarray, labels: np.ndarray) -> list[dict[str, Any]]:
    """Return the bars of both classes; rows beyond the longest 0.5% stand in the last."""
    last = max(2.0, float(np.quantile(lengths, 0.995)))
    edges = np.unique(np.linspace(0, last, BINS + 1).round().astype(int))
    bars = []
    for name, label in CLASSES.items():
        counts = np.histogram(np.minimum(lengths[labels == label], edges[-1]), edges)[0]
        for start, end, rows in zip(edges[:-1], edges[1:], counts, strict=True):
            bars.append({"part": part, "series": name, "from": int(start), "to": int(end), "rows": int(rows)})
    return bars
