"""Which rank runs which rows of a global batch in which micro-batch: pure functions of the rows' lengths.

Every rank calls these with the same arguments and gets the same answer, so nobody has to talk.

What a plan costs is the sum over its micro-batches of the slowest rank's, since the ranks wait for each other in each
(ZeRO-3 gathers parameters in step). A row of L tokens costs L + L^2 / `attention_length`: the dense layers' work and
attention's, in tokens.

Shapes:  N = rows in the global batch, R = ranks, M = micro-batches, U = units, S = segments.
"""

import heapq
import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from openkto.batches.batch import IntArray

Plan = list[list[IntArray]]  # plan[m][rank], the batch positions of that rank's micro-batch m
Bins = list[list[int]]  # of each rank, the rows or units, as places in the order from the largest to the smallest

# What a padded micro-batch costs besides its tokens, in tokens: small enough for little padding, large enough that not
# every row gets a micro-batch of its own.
MICRO_BATCH_COST = 256
# Larger batches are planned in parts, each like the whole: filling is no linear matter.
ROWS_AT_A_TIME = 8192


def row_costs(lengths_N: IntArray, attention_length: float) -> NDArray[np.float64]:
    """Return what each row costs, [N], in tokens.

    Args:
        attention_length: the length at which attention costs as much as all else; infinity leaves attention out.
    """
    lengths = lengths_N.astype(np.float64)
    return lengths + lengths**2 / attention_length


def plan_micro_batches(
    lengths_N: IntArray,
    num_ranks: int,
    max_rows: int | None = None,
    max_tokens: int | None = None,
    *,
    packed: bool = False,
    attention_length: float = math.inf,
    apart_at: tuple[int, ...] = (),
) -> Plan:
    """Deal the rows of a global batch to ranks and micro-batches, at the least cost that is quickly found.

    Every rank gets the same number of micro-batches, as ZeRO needs; some may be empty.

    Args:
        lengths_N: [N], tokens of each row after the cut.
        num_ranks: R.
        max_rows: rows in a micro-batch at most.
        max_tokens: tokens in a micro-batch at most: packed the rows' own, padded rows times the longest. A longer row
            stands alone.
        packed: whether rows are laid end to end; else padding costs, too.
        attention_length: see `row_costs`.
        apart_at: tokens, rising: rows up to such a length and longer ones never share a micro-batch.
    """
    if apart_at:
        class_N = np.searchsorted(np.array(apart_at), lengths_N)
        apart: Plan = []
        for index_N in (np.flatnonzero(class_N == one) for one in np.unique(class_N)):
            limits = (num_ranks, max_rows, max_tokens)
            plan = plan_micro_batches(lengths_N[index_N], *limits, packed=packed, attention_length=attention_length)
            apart += [[index_N[share] for share in shares] for shares in plan]
        return apart
    if packed:
        one_N = np.ones(len(lengths_N), dtype=np.int64)
        return plan_packed(lengths_N, row_costs(lengths_N, attention_length), one_N, num_ranks, max_rows, max_tokens)
    plan = []
    for order_N in _parts(lengths_N, num_ranks):
        waves = _padded_waves(lengths_N[order_N], num_ranks, max_rows, max_tokens, attention_length)
        plan += _as_plan(waves, order_N)
    return plan


def plan_packed(
    tokens_U: IntArray,
    cost_U: NDArray[np.float64],
    rows_U: IntArray,
    num_ranks: int,
    max_rows: int | None = None,
    max_tokens: int | None = None,
) -> Plan:
    """Deal units that are laid end to end to ranks and micro-batches: rows, or several that share their prompt.

    Args:
        tokens_U, cost_U, rows_U: [U], what each unit has of them.
    """
    plan = []
    for order_U in _parts(cost_U, num_ranks):
        tokens, cost, rows = tokens_U[order_U], cost_U[order_U], rows_U[order_U]
        plan += _as_plan(_packed_waves(tokens, cost, rows, num_ranks, max_rows, max_tokens), order_U)
    return plan


def _parts(size_U: NDArray[Any], num_ranks: int) -> list[IntArray]:
    """Return the units from the largest on, in parts that are planned at a time."""
    largest_first_U = np.argsort(-size_U, kind="stable").astype(np.int64)
    parts = -(-len(size_U) // max(ROWS_AT_A_TIME, 8 * num_ranks))
    return [largest_first_U[part::parts] for part in range(parts)]


def _as_plan(waves: list[Bins], order_U: IntArray) -> Plan:
    return [[order_U[np.array(units, dtype=np.int64)] for units in wave] for wave in waves]


def plan_cost(plan: Sequence[Sequence[IntArray | list[int]]], cost_N: NDArray[np.float64]) -> float:
    """Return the sum over micro-batches of the slowest rank's cost."""
    return sum(max(float(cost_N[rows].sum()) for rows in shares) for shares in plan)


# ---- packed: every micro-batch as full and as even as can be ---------------------------------------------------------


def _packed_waves(
    tokens_U: IntArray,
    cost_U: NDArray[np.float64],
    rows_U: IntArray,
    num_ranks: int,
    max_rows: int | None,
    max_tokens: int | None,
) -> list[Bins]:
    """Take the fewest micro-batches that hold the units; of two ways to fill them, the cheaper."""
    limits = max_rows or int(rows_U.sum()), max_tokens or int(tokens_U.sum())
    fewest = [
        -(-int(np.minimum(size_U, limit).sum()) // (limit * num_ranks))
        for size_U, limit in zip((rows_U, tokens_U), limits, strict=True)
    ]
    tokens, costs, rows = tokens_U.tolist(), cost_U.tolist(), rows_U.tolist()
    num_waves, most = max(1, *fewest), -(-len(tokens) // num_ranks)
    is_in_turn = max(rows) == 1  # which is made for units whose tokens and costs have one order
    while True:
        found = [_fill_evenly(tokens, costs, rows, num_ranks, *limits, num_waves)]
        if num_waves > 1 and is_in_turn:
            found.append(_fill_in_turn(tokens, costs, num_ranks, *limits, num_waves))
        full = [[wave for wave in waves if any(wave)] for waves in found if waves is not None]
        if full:
            return min(full, key=lambda waves: plan_cost(waves, cost_U))
        assert num_waves < most, "a micro-batch for each unit always serves"
        # One more at a time would take minutes where thousands are lacking: rows a little over half the limit.
        num_waves = min(num_waves + 1 + num_waves // 64, most)


def _fill_evenly(
    lengths: list[int],
    costs: list[float],
    rows: list[int],
    num_ranks: int,
    max_rows: int,
    max_tokens: int,
    num_waves: int,
) -> list[Bins] | None:
    """Give each unit, from the dearest on, to the cheapest bin of all micro-batches that has room, or return None.

    Source: longest-processing-time-first scheduling (Graham 1969).
    """
    bins: Bins = [[] for _ in range(num_ranks * num_waves)]
    load, tokens, filled = [0.0] * len(bins), [0] * len(bins), [0] * len(bins)
    cheapest = [(0.0, b) for b in range(len(bins))]

    def has_room(b: int, i: int) -> bool:
        return not bins[b] or (tokens[b] + lengths[i] <= max_tokens and filled[b] + rows[i] <= max_rows)

    for i, length in enumerate(lengths):
        passed = []
        while cheapest and not has_room(cheapest[0][1], i):
            passed.append(heapq.heappop(cheapest))
        if not cheapest:
            return None
        b = heapq.heappop(cheapest)[1]
        bins[b].append(i)
        load[b] += costs[i]
        tokens[b] += length
        filled[b] += rows[i]
        for one in passed:
            heapq.heappush(cheapest, one)
        if filled[b] < max_rows:
            heapq.heappush(cheapest, (load[b], b))
    by_cost = sorted(range(len(bins)), key=lambda b: -load[b])
    return [[bins[b] for b in by_cost[m * num_ranks : (m + 1) * num_ranks]] for m in range(num_waves)]


def _fill_in_turn(
    lengths: list[int], costs: list[float], num_ranks: int, max_rows: int, max_tokens: int, num_waves: int
) -> list[Bins] | None:
    """Fill one micro-batch after the other, or return None where some rows find no room.

    Each is filled up to the cost of the longest row that is left, where that is over its share: while one rank runs
    that row, the others run many short ones.
    """
    # following[i] leads to the first row from i on that has no place yet.
    following = list(range(len(lengths) + 1))

    def next_free(i: int) -> int:
        while following[i] != i:
            following[i] = following[following[i]]
            i = following[i]
        return i

    by_cost, by_length = [-cost for cost in costs], [-length for length in lengths]
    left, cost_left, waves = len(lengths), sum(costs), []
    for m in range(num_waves):
        longest = next_free(0)
        bins: Bins = [[] for _ in range(num_ranks)]
        tokens = [0] * num_ranks
        is_last = m == num_waves - 1 or left == 0
        room = math.inf if is_last else max(costs[longest], cost_left / num_ranks / (num_waves - m))
        cheapest = [(0.0, rank) for rank in range(num_ranks)]
        while cheapest and left:
            load, rank = heapq.heappop(cheapest)
            fits = bisect_left(by_length, tokens[rank] - max_tokens) if bins[rank] else 0
            i = next_free(max(fits, bisect_left(by_cost, load - room)))
            if i == len(lengths):
                continue
            following[i] = i + 1
            bins[rank].append(i)
            tokens[rank] += lengths[i]
            left, cost_left = left - 1, cost_left - costs[i]
            if len(bins[rank]) < max_rows:
                heapq.heappush(cheapest, (load + costs[i], rank))
        waves.append(bins)
    return waves if left == 0 else None


# ---- padded: rows of similar length together -------------------------------------------------------------------------


def _padded_waves(
    sorted_N: IntArray, num_ranks: int, max_rows: int | None, max_tokens: int | None, attention_length: float
) -> list[Bins]:
    """Cut the sorted rows into segments, and run segments of similar cost at the same time."""
    segments = _segments(sorted_N, max_rows or len(sorted_N), max_tokens or int(sorted_N.sum() + sorted_N[0]))
    cost_N = row_costs(sorted_N, attention_length)

    def cost(segment: list[int]) -> float:
        return len(segment) * float(cost_N[segment[0]])

    while len(segments) % num_ranks:
        # No rank is to stand idle: the dearest segment that can be halved is.
        dearest = max((s for s in segments if len(s) > 1), key=cost, default=None)
        if dearest is None:
            segments += [[] for _ in range(-len(segments) % num_ranks)]
            break
        segments.remove(dearest)
        middle = (len(dearest) + 1) // 2
        segments += [dearest[:middle], dearest[middle:]]
    segments.sort(key=lambda segment: -cost(segment) if segment else 0.0)
    return [segments[start : start + num_ranks] for start in range(0, len(segments), num_ranks)]


def _segments(sorted_N: IntArray, max_rows: int, max_tokens: int) -> Bins:
    """Return the cut of the sorted rows with the least padded tokens and micro-batches, each at its cost."""
    best, begins = np.zeros(len(sorted_N) + 1), np.zeros(len(sorted_N) + 1, dtype=np.int64)
    for end in range(1, len(sorted_N) + 1):
        most = min(max_rows, max(1, max_tokens // int(sorted_N[end - 1])))
        begin_S = np.arange(max(0, end - most), end)
        tokens_S = (end - begin_S) * sorted_N[begin_S]
        total_S = best[begin_S] + tokens_S + MICRO_BATCH_COST
        total_S[(tokens_S > max_tokens) & (begin_S < end - 1)] = np.inf
        chosen = int(total_S.argmin())
        best[end], begins[end] = total_S[chosen], begin_S[chosen]
    segments, end = [], len(sorted_N)
    while end > 0:
        segments.append(list(range(begins[end], end)))
        end = int(begins[end])
    return segments[::-1]
