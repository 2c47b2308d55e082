"""Which rows make up a step, as pure functions of seed, epoch and sizes.

Every rank calls these with the same arguments and gets the same answer, so nobody has to talk.

Shapes:  n = rows in the data set.
"""

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


def epoch_order(num_rows: int, seed: int, epoch: int) -> IntArray:
    """Return the order of an epoch's rows, [n]: a permutation that depends only on (seed, epoch)."""
    return np.random.default_rng([seed, epoch]).permutation(num_rows).astype(np.int64)


def batch_bounds(num_rows: int, batch_size: int) -> IntArray:
    """Return the bounds of an epoch's batches, [steps + 1]: batch b holds the rows bounds[b] to bounds[b + 1].

    No row is dropped: what is left at the end is a batch of its own, or joins the one before it where it is under
    half a batch or a single row, which could only be paired with itself.
    """
    full, rest = divmod(num_rows, batch_size)
    bounds = np.arange(full + 1, dtype=np.int64) * batch_size
    if rest == 0:
        return bounds
    if full > 0 and (2 * rest < batch_size or rest == 1):
        bounds[-1] = num_rows
        return bounds
    return np.append(bounds, num_rows)
