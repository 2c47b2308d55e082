"""The whole of an inspection as plain values: what the table, the JSON and the page show."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from openkto.data import truncation as rule
from openkto.data.balance import LARGEST_RATIO, SMALLEST_RATIO, Weight, describe_balance, resolve_weights
from openkto.data.dataset import UnpairedPreferenceDataset
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
    dataset: UnpairedPreferenceDataset,
    seen: SeenRows,
    weights: tuple[Weight, Weight],
    held_out: UnpairedPreferenceDataset | None = None,
) -> Inspection:
    """Return what there is to say of the rows that were seen, as the data set keeps them.

    Args:
        weights: --desirable_loss_weight and --undesirable_loss_weight.
        held_out: the rows that are not trained on but evaluated on.
    """
    report = dataset.report
    labels = seen.column("label")
    prompts, completions = seen.column("prompt_length"), seen.column("completion_length")
    left_out = rule.is_left_out(prompts, completions, max_len=dataset.max_len, truncation=dataset.truncation)
    counts = report.desirable, report.undesirable
    balance, warning = describe_balance(
        *resolve_weights(*weights, *counts), *counts, left_out=(report.left_out_desirable, report.left_out_undesirable)
    )
    smaller: tuple[Weight, Weight] = ("auto", 1.0) if counts[0] < counts[1] else (1.0, "auto")
    findings, label_measure = gather(seen, dataset.max_len, left_out)
    return Inspection(
        name=dataset.name,
        rows_read=report.rows_read,
        rows_kept=report.kept,
        classes=dict(zip(CLASSES, counts, strict=True)),
        formula=FORMULA,
        balance=balance,
        weights=dict(zip(CLASSES, resolve_weights(*smaller, *counts), strict=True)),
        balance_warning=warning,
        held_out=None if held_out is None else describe_held_out(dataset, held_out),
        lengths={
            name: _lengths(prompts[labels == label], completions[labels == label], left_out[labels == label], dataset)
            for name, label in CLASSES.items()
        },
        histograms=_histogram("prompt", prompts, labels) + _histogram("completion", completions, labels),
        findings=findings,
        label_measure=label_measure,
        unlabelled=report.unlabelled,
        recognised=report.findings,
        unread_fields=report.unread,
    )


def describe_held_out(training: UnpairedPreferenceDataset, held_out: UnpairedPreferenceDataset) -> str:
    """Say how many rows and prompts are on each side."""
    report = held_out.report
    sides = [
        f"{len(np.unique(side.rows))} rows of {len(set(side.prompt_digests()))} prompts"
        for side in (held_out, training)
    ]
    return (
        f"{sides[0]} are held out to evaluate on ({report.desirable} desirable, {report.undesirable} undesirable); "
        f"{sides[1]} are left to train on"
    )


def _lengths(
    prompts: np.ndarray, completions: np.ndarray, left_out: np.ndarray, dataset: UnpairedPreferenceDataset
) -> dict[str, int]:
    """Return a class's lengths in tokens before any cut, and what --max_len takes of it in rows and tokens."""
    total = prompts + completions
    kept = dataset.cut_lengths(prompts, completions)
    is_cut = (total > dataset.max_len) & ~left_out
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
