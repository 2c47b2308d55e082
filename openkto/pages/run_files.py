"""Reads what a run left in its folder, however it ended: finished, still going, killed, or resumed several times."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from openkto.config import from_yaml
from openkto.errors import ConfigError
from openkto.masking import masked_value
from openkto.report.records import EARLY_STOP

Line = dict[str, Any]


@dataclass(frozen=True)
class RowRewards:
    """The reward of each row at each step, a line for each time that a row was trained on.

    `margin` is beta s_i (r_i - point): above 0 where the row is on its label's side of the loss's reference point.
    """

    step: NDArray[np.int64]
    row: NDArray[np.int64]
    is_desirable: NDArray[np.bool_]
    reward: NDArray[np.float64]
    margin: NDArray[np.float64]


@dataclass(frozen=True)
class RunRecord:
    """One run, as its files tell it."""

    name: str
    folder: Path
    settings: dict[str, Any]  # of run.yaml
    starts: list[Line]  # a `run` line for each start
    train: list[Line]  # in the order of steps, each once
    evaluations: dict[str, list[Line]]  # by the set's name; "eval" where there is one set only
    summary: Line | None  # None while no start of the run has come to its end
    rewards: RowRewards | None = None
    samples: list[Line] = field(default_factory=list)  # by step and then by number, each once
    problems: list[str] = field(default_factory=list)  # what could not be read, in words

    @property
    def total_steps(self) -> int | None:
        """The steps of the whole run; None where its first line does not say."""
        found = self.starts[-1].get("total_steps") if self.starts else None
        return int(found) if found is not None else None

    @property
    def is_done(self) -> bool:
        """Whether the run came to its end: its last step, or the early stop that it was told to make."""
        if self.summary is None:
            return False
        ended_early = str(self.summary.get("ended", "")).startswith(EARLY_STOP)
        return ended_early or self.total_steps is None or self.summary["step"] >= self.total_steps


def read_run(folder: Path) -> RunRecord:
    """Return what a run left under its --save_path.

    Raises:
        ConfigError: there is no run in the folder.
    """
    metrics = folder / "metrics.jsonl"
    if not metrics.is_file():
        what = (
            "a folder without metrics.jsonl" if folder.is_dir() else "a file" if folder.exists() else "no such folder"
        )
        raise ConfigError(
            f"{folder}: must be the --save_path of a run; got {what}. Name the folder that the run was given."
        )
    problems: list[str] = []
    lines = list(_json_lines(metrics, problems))
    train: dict[int, Line] = {}
    evaluations: dict[str, dict[int, Line]] = {}
    starts, summary = [], None
    for line in lines:
        kind, step = line.get("kind"), line.get("step")
        if not isinstance(step, int):
            continue
        if kind == "run":
            starts.append(line)
        elif kind == "train":
            train[step] = line
        elif kind == "eval":
            evaluations.setdefault(str(line.get("eval_set", "eval")), {})[step] = line
        elif kind == "summary":
            summary = line
    if summary is not None and train and max(train) > summary["step"]:
        summary = None  # of an early stop, after which the run was resumed
    if not train and not evaluations:
        problems.append("metrics.jsonl holds no step yet")
    return RunRecord(
        name=folder.resolve().name,
        folder=folder,
        settings=_settings(folder / "run.yaml", problems),
        starts=starts,
        train=[train[step] for step in sorted(train)],
        evaluations={name: [found[step] for step in sorted(found)] for name, found in evaluations.items()},
        summary=summary,
        rewards=_rewards(folder / "rewards.jsonl", problems),
        samples=_samples(folder / "samples.jsonl", problems),
        problems=problems,
    )


def run_until(run: RunRecord, step: int) -> RunRecord:
    """Return the run as it stood at a step, such as that of a checkpoint."""
    rewards = run.rewards
    if rewards is not None:
        is_before = rewards.step <= step
        rewards = RowRewards(**{name: column[is_before] for name, column in vars(rewards).items()})
    return replace(
        run,
        settings={name: value for name, value in run.settings.items() if name != "load_best_at_end"},
        train=[line for line in run.train if line["step"] <= step],
        evaluations={name: [line for line in lines if line["step"] <= step] for name, lines in run.evaluations.items()},
        rewards=rewards,
    )


def with_distinct_names(runs: list[RunRecord]) -> list[str]:
    """Return a name for each run: its folder's, or as much of the path as tells it from the others."""
    parts = [run.folder.resolve().parts for run in runs]
    for length in range(1, max(len(path) for path in parts) + 1):
        names = ["/".join(path[-length:]) for path in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{name} ({number})" for number, name in enumerate(names, 1)]


def _json_lines(path: Path, problems: list[str]) -> Iterator[Line]:
    """Yield a file's JSON objects; a line that is none, such as one that a kill cut short, is counted."""
    broken = 0
    with path.open("rb") as file:
        for text in file:
            try:
                value = json.loads(text)
            except ValueError:
                broken += bool(text.strip())
                continue
            if isinstance(value, dict):
                yield value
            else:
                broken += 1
    if broken:
        problems.append(f"{path.name}: {broken} lines could not be read")


def _settings(path: Path, problems: list[str]) -> dict[str, Any]:
    """Return the settings as they may be shown: somebody may have written the file with whole addresses."""
    try:
        found = from_yaml(path.read_text(encoding="utf-8"))
        return {name: masked_value(value) for name, value in found.items()}
    except (OSError, ValueError) as error:
        problems.append(f"run.yaml could not be read ({type(error).__name__}): the settings are not known")
        return {}


def _rewards(path: Path, problems: list[str]) -> RowRewards | None:
    """Return the rows' rewards; a step that was made again after a resume counts as it was made last."""
    if not path.is_file():
        return None
    steps: dict[int, Line] = {}
    for line in _json_lines(path, problems):
        columns = [line.get(name) for name in ("rows", "desirable", "rewards")]
        is_whole = all(isinstance(column, list) and len(column) == len(columns[0] or ()) for column in columns)
        if isinstance(line.get("step"), int) and is_whole and isinstance(line.get("point"), (int, float)):
            steps[line["step"]] = line
    if not steps:
        return None
    ordered = [steps[step] for step in sorted(steps)]
    sizes = [len(line["rows"]) for line in ordered]
    reward = np.array([value for line in ordered for value in line["rewards"]], dtype=np.float64)
    is_desirable = np.array([value for line in ordered for value in line["desirable"]], dtype=bool)
    point = np.repeat([float(line["point"]) for line in ordered], sizes)
    return RowRewards(
        step=np.repeat([line["step"] for line in ordered], sizes).astype(np.int64),
        row=np.array([value for line in ordered for value in line["rows"]], dtype=np.int64),
        is_desirable=is_desirable,
        reward=reward,
        margin=np.where(is_desirable, 1.0, -1.0) * (reward - point),
    )


def _samples(path: Path, problems: list[str]) -> list[Line]:
    """Return the answers to prompts; those that were made again after a resume count as they were made last."""
    if not path.is_file():
        return []
    found: dict[tuple[int, int], Line] = {}
    for line in _json_lines(path, problems):
        is_numbered = all(isinstance(line.get(name), int) for name in ("step", "sample"))
        if is_numbered and all(isinstance(line.get(name), str) for name in ("prompt", "greedy", "sampled")):
            found[line["step"], line["sample"]] = line
    return [found[key] for key in sorted(found)]


def mean_over(lines: list[Line], metric: str) -> float | None:
    """Return the mean of a metric over the lines that have it; None where none does."""
    values = [float(line[metric]) for line in lines if isinstance(line.get(metric), (int, float))]
    values = [value for value in values if math.isfinite(value)]
    return sum(values) / len(values) if values else None
