"""The table of `benchmarks/vs_trl.py`: what each side's processes saw, in ratio to the first side, which is OpenKTO."""

import argparse
import statistics
from typing import Any, NamedTuple

import torch

# Of a process: `imported`, `began`, `ended` (of each step) and `saved` in seconds since its start, `reference` in
# seconds; `base_gib` after the imports and `peak_gib` after each step; the version of `torch`.
Result = dict[str, Any]


class Rows(NamedTuple):
    """What the sides train on."""

    batch: int
    steps: int  # in an epoch
    tokens: int  # of an epoch's matched rows
    prompt_tokens: int  # of them


class Side(NamedTuple):
    """The medians of a side's rounds."""

    step: float  # seconds
    imports: float
    reference: dict[int, float]  # seconds to fill the cache or to precompute, by the number of epochs
    total: dict[int, float]  # from the start to the saved model, likewise
    peak_gib: float
    rise_gib: float  # above what the imports take


def measure(rounds: list[dict[int, Result]], rows: Rows, epochs: list[int]) -> Side:
    """Return the medians of a side.

    Args:
        rounds: of each round, what was seen by the number of epochs; a missing number is read off the longest run.
    """
    longest = [seen[max(seen)] for seen in rounds]
    return Side(
        step=statistics.median(_step(result) for result in longest),
        imports=statistics.median(result["imported"] for seen in rounds for result in seen.values()),
        reference={n: statistics.median(_of(seen, n)["reference"] for seen in rounds) for n in epochs},
        total={n: statistics.median(_total(_of(seen, n), n * rows.steps) for seen in rounds) for n in epochs},
        peak_gib=statistics.median(result["peak_gib"][-1] for result in longest),
        rise_gib=statistics.median(result["peak_gib"][-1] - result["base_gib"] for result in longest),
    )


def _of(seen: dict[int, Result], epochs: int) -> Result:
    return seen.get(epochs, seen[max(seen)])


def _step(result: Result) -> float:
    """Return the mean seconds of a step, without the first, which warms up, where there are others."""
    ended = result["ended"]
    return (ended[-1] - ended[0]) / (len(ended) - 1) if len(ended) > 1 else ended[0] - result["began"]


def _total(result: Result, steps: int) -> float:
    """Return the seconds from the start to the saved model of a run that ends after so many steps."""
    return float(result["ended"][steps - 1] + result["saved"] - result["ended"][-1])


def header(args: argparse.Namespace) -> str:
    """Return what is measured, and the table's first lines."""
    titles = ["rows", "side", "a step, s", "ratio"]
    for n in args.epochs:
        epochs = "one epoch" if n == 1 else f"{n} epochs"
        titles += [f"{epochs}, s (of that the reference beforehand)", "ratio", "ratio without imports"]
    titles += ["imports, s", "peak GiB (above imports)", "ratio"]
    return (
        f"Epochs of {args.steps} steps of {args.batch} rows, max_len {args.max_len}, {args.rounds} rounds; torch "
        f"{torch.__version__}, {args.threads} threads, {args.clock} clock; seconds from the start of a process to the "
        f"saved model; ratios to the first side\n\n| {' | '.join(titles)} |\n|{' --- |' * len(titles)}"
    )


def lines(
    name: str, rows: Rows, results: dict[str, list[dict[int, Result]]], names: dict[str, str], epochs: list[int]
) -> list[str]:
    """Return a line of the table for each side."""
    found = {side: measure(rounds, rows, epochs) for side, rounds in results.items() if rounds}
    versions = {result["torch"] for rounds in results.values() for seen in rounds for result in seen.values()}
    assert len(versions) <= 1, f"both sides run on the same torch, not on {versions}"
    own = found.get(next(iter(results)))
    about = f"{name}: {rows.tokens / (rows.batch * rows.steps):.0f} tokens a row, prompts {_share(rows):.0%}"
    return [
        _line(about, names[side], found[side], own, epochs)
        if side in found
        else f"| {about} | {names[side]} | failed |"
        for side in results
    ]


def _share(rows: Rows) -> float:
    return rows.prompt_tokens / rows.tokens


def _line(about: str, name: str, side: Side, own: Side | None, epochs: list[int]) -> str:
    def ratio(value: float, of_own: float | None) -> str:
        return "-" if of_own is None else f"{value / of_own:.2f}"

    cells = [about, name, f"{side.step:.2f}", ratio(side.step, own and own.step)]
    for n in epochs:
        cells += [
            f"{side.total[n]:.1f} ({side.reference[n]:.1f})",
            ratio(side.total[n], own and own.total[n]),
            ratio(side.total[n] - side.imports, own and own.total[n] - own.imports),
        ]
    memory = f"{side.peak_gib:.2f} ({side.rise_gib:.2f})"
    cells += [f"{side.imports:.1f}", memory, ratio(side.peak_gib, own and own.peak_gib)]
    return f"| {' | '.join(cells)} |"
