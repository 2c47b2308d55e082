"""The area under the ROC curve, which needs no torch."""

import numpy as np
from numpy.typing import NDArray


def area_under_curve(reward_N: NDArray[np.float64], is_desirable_N: NDArray[np.bool_]) -> float:
    """Return the probability that a desirable row has the larger reward; a tie counts half.

    Both classes must be there.
    """
    chosen, rejected = reward_N[is_desirable_N], np.sort(reward_N[~is_desirable_N])
    below = np.searchsorted(rejected, chosen, side="left")
    not_above = np.searchsorted(rejected, chosen, side="right")
    return float((below + not_above).sum() / (2 * len(chosen) * len(rejected)))
