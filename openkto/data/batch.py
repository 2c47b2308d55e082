"""Which rows make a step and who is paired with whom: pure functions of known numbers.

Every rank calls these with the same arguments and gets the same answer, so nobody has to talk.

Shapes:  N = rows in the global batch, n = rows in the data set.
"""

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


def epoch_order(num_rows: int, seed: int, epoch: int) -> IntArray:
    """Return the order of an epoch's rows, [n]: a permutation that depends on (seed, epoch) alone."""
    return np.random.default_rng([seed, epoch]).permutation(num_rows).astype(np.int64)


def batch_bounds(num_rows: int, batch_size: int) -> IntArray:
    """Return the bounds of an epoch's batches, [steps + 1]: batch b holds the rows bounds[b] to bounds[b + 1].

    No row is dropped: what is left at the end is a batch of its own, or joins the one before it where it is under
    half a batch or a single row, which could be paired with itself alone.
    """
    full, rest = divmod(num_rows, batch_size)
    bounds = np.arange(full + 1, dtype=np.int64) * batch_size
    if rest == 0:
        return bounds
    if full > 0 and (2 * rest < batch_size or rest == 1):
        bounds[-1] = num_rows
        return bounds
    return np.append(bounds, num_rows)


def pair_mismatched(prompt_keys_N: IntArray) -> IntArray:
    """Return s, [N]: row i's prompt is paired with the completion of row s[i].

    s is a permutation, so the mismatched completions are exactly the batch's own. Rotation by one serves unless it
    pairs equal prompts. Then the rows are sorted stably by the first appearance of their prompt and rotated by the
    size g of the largest group, which leaves max(0, 2g - N) rows with a completion of their own prompt: the fewest
    possible. A batch of a single prompt stays with rotation by one, so that no row is paired with itself.

    Source: the KL estimate of arXiv:2402.01306, section 4.1, with partners kept apart from their own prompt.
    """
    n = len(prompt_keys_N)
    by_one_N = (np.arange(n, dtype=np.int64) - 1) % max(n, 1)
    if not np.any(prompt_keys_N == prompt_keys_N[by_one_N]):
        return by_one_N
    _, first_seen, group_N, size = np.unique(prompt_keys_N, return_index=True, return_inverse=True, return_counts=True)
    if len(size) == 1:
        return by_one_N
    grouped_N = np.argsort(first_seen[group_N], kind="stable")
    partner_N = np.empty(n, dtype=np.int64)
    partner_N[grouped_N] = np.roll(grouped_N, int(size.max()))
    return partner_N
