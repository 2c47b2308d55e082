"""Which rows make a step, who is paired with whom, and which rank runs what: pure functions of known numbers.

Every rank calls these with the same arguments and gets the same answer, so nobody has to talk.

Shapes:  N = rows in the global batch, R = ranks, n = rows in the data set.
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


def plan_micro_batches(
    lengths_N: IntArray, num_ranks: int, max_rows: int, max_tokens: int | None = None
) -> list[list[IntArray]]:
    """Deal the rows of a global batch to ranks and micro-batches.

    Rows of similar length run at the same time on all ranks, so padding is small and nobody waits long. Every rank
    gets the same number of micro-batches, as ZeRO needs; some may be empty.

    Args:
        lengths_N: [N], tokens of each row after the cut.
        num_ranks: R.
        max_rows: rows in a micro-batch at most.
        max_tokens: padded tokens (rows times the longest) in a micro-batch at most; a longer row stands alone.

    Returns:
        plan[m][rank], the batch positions of that rank's micro-batch m.
    """
    longest_first_N = np.argsort(-lengths_N, kind="stable").astype(np.int64)
    waves = []
    start = 0
    while start < len(longest_first_N):
        rows = max_rows
        if max_tokens is not None:
            rows = min(max_rows, max(1, max_tokens // int(lengths_N[longest_first_N[start]])))
        waves.append(longest_first_N[start : start + rows * num_ranks])
        start += rows * num_ranks
    if max_tokens is None and waves:
        waves = np.array_split(longest_first_N, len(waves))
    plan = []
    for m, wave in enumerate(waves):
        # The shares that hold one row more are the last ones, whose rows are shorter; every second wave is dealt the
        # other way round, so that no rank gets all the long ones.
        few, extra = divmod(len(wave), num_ranks)
        sizes = [few] * (num_ranks - extra) + [few + 1] * extra
        shares = np.split(wave, np.cumsum(sizes)[:-1])
        plan.append(shares if m % 2 == 0 else shares[::-1])
    return plan
