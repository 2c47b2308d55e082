"""The plots of a report as Vega-Lite specifications: one definition each, drawn by the page and written as PNG.

A chart's data are points {step, value, series}; a chart of several runs has a series for each run.
"""

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from openkto.pages.run_files import Line, RowRewards, RunRecord

Spec = dict[str, Any]
Point = dict[str, Any]

MAX_POINTS = 1000  # of a series: what a screen shows, and what keeps the page of a long run small
FEW_POINTS = 60  # of a series, whose points are marked
HISTOGRAM_BINS = 30
PARTS = ("first third", "second third", "last third")
# Okabe and Ito's colours, which readers with colour blindness tell apart.
DESIRABLE, UNDESIRABLE = "desirable", "undesirable"
COLOURS = {
    DESIRABLE: "#0072B2",
    UNDESIRABLE: "#D55E00",
    "training": "#0072B2",
    "evaluation": "#D55E00",
    "z_ref": "#0072B2",
    "before the clamp at 0": "#999999",
}
CLASS_COLOURS = {
    "field": "series",
    "type": "nominal",
    "title": None,
    "scale": {"domain": [DESIRABLE, UNDESIRABLE], "range": [COLOURS[DESIRABLE], COLOURS[UNDESIRABLE]]},
    "legend": {"orient": "bottom", "symbolOpacity": 1},
}
PALETTE = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999", "#8C6D31"]
SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"


@dataclass(frozen=True)
class Chart:
    """A plot with what it is called, and what is good to know when one looks at it."""

    key: str
    title: str
    note: str
    spec: Spec


@dataclass(frozen=True)
class Plot:
    """What a chart of lines shows: metrics of training and evaluation lines, by the name of their series."""

    key: str
    title: str
    unit: str
    note: str
    train: dict[str, str]  # series -> metric
    evaluation: dict[str, str]
    scale: str = "linear"
    digits: str | None = None  # d3's format of the axis


PLOTS = (
    Plot("loss", "Loss", "loss", "What is minimised.", {"training": "loss"}, {"evaluation": "loss"}),
    Plot(
        "rewards",
        "Rewards by class",
        "beta * log-ratio",
        "The lines should part, desirable above undesirable; both may fall.",
        {DESIRABLE: "rewards/chosen", UNDESIRABLE: "rewards/rejected"},
        {},
    ),
    Plot(
        "margins",
        "Reward margin",
        "beta * log-ratio",
        "The mean reward of desirable rows less that of undesirable ones.",
        {"training": "rewards/margins"},
        {"evaluation": "rewards/margins"},
    ),
    Plot(
        "auc",
        "AUC",
        "probability",
        "How often a desirable row has the larger reward than an undesirable one; 0.5 is chance.",
        {"training": "rewards/auc"},
        {"evaluation": "rewards/auc"},
    ),
    Plot(
        "accuracy",
        "Accuracy",
        "share of rows",
        "Rows on the right side of the reference point.",
        {"training": "rewards/accuracy"},
        {"evaluation": "rewards/accuracy"},
    ),
    Plot(
        "kl",
        "Reference point z_ref",
        "nats",
        "Clamped at 0, as the loss uses it, and before the clamp.",
        {"z_ref": "kl", "before the clamp at 0": "kl_unclamped"},
        {},
    ),
    Plot("grad_norm", "Gradient norm", "norm", "Before clipping.", {"training": "grad_norm"}, {}, "symlog"),
    Plot(
        "learning_rate",
        "Learning rate",
        "rate",
        "The one used in the step.",
        {"training": "learning_rate"},
        {},
        digits=".1e",
    ),
    Plot(
        "logps",
        "Log-probability of completions",
        "nats a row",
        "The policy's own, by class.",
        {DESIRABLE: "logps/chosen", UNDESIRABLE: "logps/rejected"},
        {},
    ),
    Plot(
        "speed",
        "Throughput",
        "tokens a second",
        "Evaluation and saving left out.",
        {"training": "tokens_per_second"},
        {},
        digits="~s",
    ),
    Plot("memory", "Peak memory", "GiB", "The largest over ranks.", {"training": "peak_memory_gb"}, {}),
)


def charts_of(runs: list[RunRecord], names: list[str]) -> list[Chart]:
    """Return the charts that the runs have values for.

    One run shows its own series in a chart; several share a chart for each metric, a colour a run.
    """
    found = _of_one(runs[0]) if len(runs) == 1 else _of_several(runs, names)
    if len(runs) == 1 and runs[0].rewards is not None:
        found.append(_histograms(runs[0].rewards))
    return found


def _of_one(run: RunRecord) -> list[Chart]:
    charts = []
    for plot in PLOTS:
        points = [point for series, metric in plot.train.items() for point in _points(run.train, metric, series)]
        for name, lines in run.evaluations.items():
            of_set = f" of {name}" if len(run.evaluations) > 1 else ""
            for series, metric in plot.evaluation.items():
                points += _points(lines, metric, series + of_set)
        band = _bands(run.rewards) if plot.key == "rewards" and run.rewards is not None else []
        if points:
            note = plot.note + (" The bands hold 80% of a class's rows." if band else "")
            charts.append(Chart(plot.key, plot.title, note, _lines(plot, points, band)))
    return charts


def _of_several(runs: list[RunRecord], names: list[str]) -> list[Chart]:
    """Return a chart for each metric of training and evaluation, where two runs or more have it."""
    charts = []
    for plot in PLOTS:
        for kind, metrics in (("training", plot.train), ("evaluation", plot.evaluation)):
            for series, metric in metrics.items():
                points = []
                for run, name in zip(runs, names, strict=True):
                    sets = {"": run.train} if kind == "training" else run.evaluations
                    for eval_set, lines in sets.items():
                        points += _points(lines, metric, f"{name}: {eval_set}" if len(sets) > 1 else name)
                if points:
                    what = series if series not in ("training", "evaluation") else kind
                    key = f"{plot.key}_{kind}_{metric.replace('/', '_')}"
                    charts.append(Chart(key, f"{plot.title}, {what}", plot.note, _lines(plot, points, [])))
    return charts


def _points(lines: list[Line], metric: str, series: str) -> list[Point]:
    """Return a metric's points, neighbouring ones pooled to their mean where there are more than a screen shows."""
    pairs = [(line["step"], float(line[metric])) for line in lines if isinstance(line.get(metric), (int, float))]
    if len(pairs) <= MAX_POINTS:
        pooled = pairs
    else:
        bounds = np.linspace(0, len(pairs), MAX_POINTS + 1).astype(int)
        pooled = [(pairs[b - 1][0], float(np.mean([v for _, v in pairs[a:b]]))) for a, b in pairwise(bounds)]
    return [{"step": step, "value": _short(value), "series": series} for step, value in pooled]


def _bands(rewards: RowRewards) -> list[Point]:
    """Return the 10% and 90% quantiles of each class's rewards, over steps pooled to at most 100 places."""
    steps = np.unique(rewards.step)
    places = np.array_split(steps, min(len(steps), 100))
    band = []
    for place in places:
        is_here = (rewards.step >= place[0]) & (rewards.step <= place[-1])
        for name, is_class in ((DESIRABLE, rewards.is_desirable), (UNDESIRABLE, ~rewards.is_desirable)):
            values = rewards.reward[is_here & is_class]
            if len(values):
                low, high = np.quantile(values, [0.1, 0.9])
                band.append({"step": int(place[-1]), "low": _short(low), "high": _short(high), "series": name})
    return band


def _lines(plot: Plot, points: list[Point], band: list[Point]) -> Spec:
    series = list(dict.fromkeys(point["series"] for point in points))
    colours = [COLOURS.get(name, PALETTE[i % len(PALETTE)]) for i, name in enumerate(series)]
    colour = {
        "field": "series",
        "type": "nominal",
        "title": None,
        "scale": {"domain": series, "range": colours},
        "legend": {"orient": "bottom", "columns": 2} if len(series) > 1 else None,
    }
    x = {
        "field": "step",
        "type": "quantitative",
        "title": "step",
        "axis": {"tickCount": 6, "tickMinStep": 1, "format": "d"},
    }
    scale = {"zero": False} if plot.scale == "linear" else {"type": plot.scale}
    y = {"field": "value", "type": "quantitative", "title": plot.unit, "scale": scale}
    if plot.digits is not None:
        y["axis"] = {"format": plot.digits}
    tooltip = [{"field": "series"}, {"field": "step"}, {"field": "value", "format": ".5g"}]
    line = {
        "data": {"values": points},
        "mark": {"type": "line", "clip": True},
        "encoding": {"x": x, "y": y, "color": colour, "tooltip": tooltip},
    }
    # A series of a single point, such as one evaluation, has no line to be seen by.
    lengths = Counter(point["series"] for point in points)
    few = [point for point in points if lengths[point["series"]] <= FEW_POINTS]
    dots = {**line, "data": {"values": few}, "mark": {"type": "point", "filled": True, "size": 50, "opacity": 1}}
    area = {
        "data": {"values": band},
        "mark": {"type": "area", "opacity": 0.2},
        "encoding": {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"}, "color": colour},
    }
    return {
        "$schema": SCHEMA,
        "width": "container",
        "height": 200,
        "layer": [*([area] if band else []), *([dots] if few else []), line],
    }


def _histograms(rewards: RowRewards) -> Chart:
    """Return each class's rewards as a histogram for each third of the steps, all on the same axis."""
    low, high = (float(end) for end in np.quantile(rewards.reward, [0.005, 0.995]))
    edges = np.linspace(low, high if high > low else low + 1.0, HISTOGRAM_BINS + 1)
    last = int(rewards.step.max())
    third = np.minimum((rewards.step - 1) * 3 // last, 2)
    bars = []
    for number, part in enumerate(PARTS):
        for name, is_class in ((DESIRABLE, rewards.is_desirable), (UNDESIRABLE, ~rewards.is_desirable)):
            values = np.clip(rewards.reward[(third == number) & is_class], edges[0], edges[-1])
            counts = np.histogram(values, edges)[0]
            share = counts / max(1, len(values))
            bars += [
                {"from": _short(a), "to": _short(b), "share": _short(s), "series": name, "part": part}
                for (a, b), s in zip(pairwise(edges), share, strict=True)
            ]
    spec = {
        "$schema": SCHEMA,
        "data": {"values": bars},
        "facet": {"row": {"field": "part", "type": "nominal", "sort": list(PARTS), "title": None}},
        "spec": {
            "width": 260,
            "height": 60,
            "mark": {"type": "bar", "opacity": 0.6, "binSpacing": 0},
            "encoding": {
                "x": {"field": "from", "type": "quantitative", "bin": {"binned": True}, "title": "beta * log-ratio"},
                "x2": {"field": "to"},
                "y": {"field": "share", "type": "quantitative", "stack": None, "title": None, "axis": {"format": "%"}},
                "color": CLASS_COLOURS,
            },
        },
    }
    note = "The share of a class's rows by reward, over training. Rows beyond the ends stand in the last bars."
    return Chart("histograms", "Rewards over training", note, spec)


def _short(value: float) -> float:
    """Return the number with as many digits as a plot can show."""
    return float(f"{value:.5g}")
