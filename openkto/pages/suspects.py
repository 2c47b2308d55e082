"""Which rows are most likely mislabelled: those whose reward stays on the other label's side, late in training."""

from dataclasses import dataclass

import numpy as np

from openkto.pages.run_files import RowRewards

LATE = 0.5  # the share of the steps, from the end, that is looked at; all rows that were not seen there by their last


@dataclass(frozen=True)
class Suspect:
    """A row with a margin on the wrong side, averaged over the times that it was trained on late in the run."""

    row: int
    is_desirable: bool
    margin: float  # beta * nats, below 0
    strangeness: float  # how many spreads of its class the margin lies below its class's middle


def suspects_of(rewards: RowRewards, at_most: int) -> list[Suspect]:
    """Return the most suspect rows, the worst first.

    A row's margins are averaged over the later half of the steps, each relative to the median margin of its step's
    class, in units of that class's spread (the median absolute deviation of the late margins): as the model learns what
    the label means, a wrong label stands out against the rows that bear the right one.
    """
    is_late = rewards.step > rewards.step.max() * (1 - LATE)
    is_late |= ~np.isin(rewards.row, rewards.row[is_late]) & _is_last_visit(rewards)
    row, margin, is_desirable = rewards.row[is_late], rewards.margin[is_late], rewards.is_desirable[is_late]
    strange = np.zeros_like(margin)
    for is_class in (is_desirable, ~is_desirable):
        if is_class.any():
            middle = np.median(margin[is_class])
            spread = np.median(np.abs(margin[is_class] - middle))
            strange[is_class] = (middle - margin[is_class]) / max(float(spread), 1e-12)
    found: list[Suspect] = []
    numbers, place = np.unique(row, return_inverse=True)
    visits = np.bincount(place)
    mean_margin = np.bincount(place, weights=margin) / visits
    mean_strange = np.bincount(place, weights=strange) / visits
    label = np.zeros(len(numbers), dtype=bool)
    label[place] = is_desirable
    for i in np.argsort(-mean_strange, kind="stable"):
        if mean_margin[i] < 0 and len(found) < at_most:
            found.append(Suspect(int(numbers[i]), bool(label[i]), float(mean_margin[i]), float(mean_strange[i])))
    return found


def _is_last_visit(rewards: RowRewards) -> np.ndarray:
    """Return which lines are the last of their row."""
    _, last_from_behind = np.unique(rewards.row[::-1], return_index=True)
    is_last = np.zeros(len(rewards.row), dtype=bool)
    is_last[len(rewards.row) - 1 - last_from_behind] = True
    return is_last
