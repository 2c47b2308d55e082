"""Labels that are likely inverted: rows whose words are those of the other class.

Naive Bayes on the words of the completion judges each row from the rows of other folds. Where words tell the classes
apart, the scores of right labels thin out away from their class's middle; inverted ones pile up again at the middle of
the other class. Only such a pile is taken for wrong labels: that classes overlap is no fault.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from openkto.inspection.words import WordTexts
from openkto.report.auc import area_under_curve

FOLDS = 5
BUCKETS = 2**18  # of hashed words
LOWEST_AUC = 0.8  # under it, words tell too little of the labels to accuse a row
LEAST_ROWS = 20  # of each class
LEAST_PILE = 3  # rows
PILE = 2.0  # how many times as many rows lie at the other class's middle as in the valley between the middles
METHOD = (
    f"naive Bayes on the completion's words, {FOLDS}-fold cross-validated, has an AUC of {LOWEST_AUC} or more, and the "
    f"class's scores pile up a second time at the other class's middle ({PILE:g} times as many rows as halfway)"
)


@dataclass(frozen=True)
class LabelErrors:
    """The suspected rows, the strangest first, and how well words tell the labels; None where they cannot be asked."""

    rows: NDArray[np.int64]
    auc: float | None

    @property
    def text(self) -> str:
        """What the measure says, in words."""
        if self.auc is None:
            return f"not asked: it takes {LEAST_ROWS} rows of each class"
        if self.auc < LOWEST_AUC:
            return f"words tell too little of the labels (AUC {self.auc:.2f}, {LOWEST_AUC} is needed) to suspect a row"
        return f"words tell the labels with an AUC of {self.auc:.2f}; {len(self.rows)} rows stand with the other class"


def find_label_errors(
    completions: WordTexts, labels: NDArray[np.bool_], completion_keys: NDArray[np.int32]
) -> LabelErrors:
    """Return the rows whose label is likely inverted.

    Args:
        labels: true for desirable.
        completion_keys: a number for each different completion; equal ones stay in one fold.
    """
    nothing = np.zeros(0, dtype=np.int64)
    if min(labels.sum(), (~labels).sum()) < LEAST_ROWS:
        return LabelErrors(nothing, None)
    order = np.random.default_rng(0).permutation(int(completion_keys.max()) + 1)
    scores = held_out_scores(completions, labels, (order % FOLDS).astype(np.int8)[completion_keys])
    auc = area_under_curve(scores, labels)
    if auc < LOWEST_AUC:
        return LabelErrors(nothing, auc)
    found, depth = [nothing], [np.zeros(0)]
    for label in (True, False):
        sign = 1.0 if label else -1.0
        own, other = (float(np.median(sign * scores[labels == side])) for side in (label, not label))
        half = (own - other) / 2
        # 0 is the other class's middle, 1 the valley, 2 this class's own middle.
        place = (sign * scores - other) / half
        is_class = labels == label
        pile = int((is_class & (np.abs(place) < 0.5)).sum())
        valley = int((is_class & (np.abs(place - 1) < 0.5)).sum())
        if pile >= LEAST_PILE and pile >= PILE * valley:
            rows = np.flatnonzero(is_class & (place < 0.5))
            found.append(rows)
            depth.append(place[rows])
    rows = np.concatenate(found)
    return LabelErrors(rows[np.argsort(np.concatenate(depth), kind="stable")], auc)


def held_out_scores(completions: WordTexts, labels: NDArray[np.bool_], folds: NDArray[np.int8]) -> NDArray[np.float64]:
    """Return each row's log-odds of being desirable, by the rows of other folds, over the square root of its words."""
    counts = np.zeros((FOLDS, 2, BUCKETS))
    for first, words, text in completions.chunks(0, len(completions)):
        rows = first + text
        place = (folds[rows].astype(np.int64) * 2 + labels[rows]) * BUCKETS + words % BUCKETS
        counts += np.bincount(place, minlength=counts.size).reshape(counts.shape)
    others = counts.sum(axis=0) - counts + 1.0
    seen = (counts.sum(axis=0) - counts).sum(axis=1) > 0
    log_odds = np.log(others[:, 1]) - np.log(others[:, 0])
    log_odds -= (np.log(others[:, 1].sum(axis=1)) - np.log(others[:, 0].sum(axis=1)))[:, None]
    log_odds[~seen] = 0.0
    scores = np.zeros(len(completions))
    for first, words, text in completions.chunks(0, len(completions)):
        count = int(text[-1]) + 1 if len(text) else 0
        value = log_odds[folds[first + text], words % BUCKETS]
        scores[first : first + count] = np.bincount(text, weights=value, minlength=count)
    scores /= np.sqrt(np.maximum(1, np.diff(completions.starts)))
    return scores
