"""Which sequences of forwards without gradient run their prompt once: pure functions of lengths and prompts.

Every rank calls these with the same arguments and gets the same answer, so nobody has to talk.

Shapes:  P = pairs of a prompt and a completion, U = units: pairs that share a prompt and stay together, R = ranks.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from openkto.batches.batch import IntArray
from openkto.batches.layout import Layout
from openkto.batches.micro_batch import DUMMY_TOKENS, TokenRows
from openkto.batches.plan import Plan, plan_cost, plan_packed, row_costs

# Completions to a prompt in one unit, to be tried: larger units run the prompt less often and are harder to spread over
# the ranks. Beyond the last there is little left to gain, and the copies of a prompt's keys begin to cost memory.
COMPLETIONS = (1, 2, 4, 8)


class PairPlan(NamedTuple):
    """A plan of pairs, and what of them runs."""

    plan: Plan  # plan[m][rank], the pairs of a micro-batch; those that share a prompt stand together
    run_P: IntArray  # [P], the tokens of each pair that run
    reused_P: IntArray  # [P], those of its prompt that run in another: the pair before it that reuses none, or a row


def sharable_prompts(data: TokenRows, pairs_P2: IntArray, lengths_P: IntArray) -> IntArray:
    """Return the tokens of pairs' prompts, [P], by whose prompt and whose completion they have; 0 where not sharable.

    Args:
        lengths_P: [P], the pairs' tokens after the cut.
    """
    prompt_P: IntArray = data.prompt_lengths[pairs_P2[:, 0]].astype(np.int64)
    if data.truncation == "prompt":
        # What is left of a prompt that was cut depends on the completion.
        prompt_P[prompt_P + data.completion_lengths[pairs_P2[:, 1]] > lengths_P] = 0
    return prompt_P


def least_tokens(lengths_P: IntArray, prompt_P: IntArray, key_P: IntArray) -> int:
    """Return the tokens that pairs run where all that share a prompt stay together, as many of them as ever do.

    Args:
        lengths_P, prompt_P, key_P: as `plan_shared` takes them.
    """
    shared = prompt_P > 0
    _, first_K, count_K = np.unique(key_P[shared], return_index=True, return_counts=True)
    reused_K = count_K - -(-count_K // COMPLETIONS[-1])
    return int(lengths_P.sum() - (prompt_P[shared][first_K] * reused_K).sum())


def plan_shared(
    lengths_P: IntArray,
    prompt_P: IntArray,
    key_P: IntArray,
    num_ranks: int,
    max_rows: int | None = None,
    max_tokens: int | None = None,
    *,
    attention_length: float = math.inf,
    with_gradient: bool = False,
) -> PairPlan:
    """Deal pairs to ranks and micro-batches so that equal prompts run once where that makes the plan cheaper.

    Args:
        lengths_P: [P], tokens of each pair after the cut.
        prompt_P: [P], those of its prompt; 0 where it cannot be shared.
        key_P: [P], equal where the prompts are.
        num_ranks: R.
        max_rows: pairs in a micro-batch at most.
        max_tokens: tokens that run in a micro-batch at most; a longer pair stands alone.
        attention_length: see `row_costs`.
        with_gradient: limit whole pairs' tokens: of each, the backward keeps a copy of keys and values.
    """
    if not len(lengths_P):
        return PairPlan([], lengths_P, lengths_P)
    cost_P = row_costs(lengths_P, attention_length)
    uncounted_P = np.zeros_like(prompt_P) if with_gradient else prompt_P  # by the limit, where another pair's serves
    found = []
    for most in COMPLETIONS:
        limits = min(most, max_rows or most), max_tokens or math.inf
        units = _units(lengths_P, prompt_P, uncounted_P, key_P, *limits)
        reused_P = _reused(units, prompt_P)
        run_P, left_P = lengths_P - reused_P, cost_P - row_costs(reused_P, attention_length)
        limited_P = lengths_P - _reused(units, uncounted_P)
        rows_U = np.array([len(unit) for unit in units], dtype=np.int64)
        starts_U, order_P = rows_U.cumsum() - rows_U, _pairs_of(units, np.arange(len(units)))
        tokens_U, cost_U = (np.add.reduceat(size_P[order_P], starts_U) for size_P in (limited_P, left_P))
        plan_U = plan_packed(tokens_U, cost_U, rows_U, num_ranks, max_rows, max_tokens)
        plan = [[_pairs_of(units, share) for share in shares] for shares in plan_U]
        found.append((plan_cost(plan, left_P), PairPlan(plan, run_P, reused_P)))
        if rows_U.max() < most:
            break
    return min(found, key=lambda one: one[0])[1]


def plan_after_prompts(
    matched: PairPlan, lengths_P: IntArray, prompt_P: IntArray, held_tokens: int, max_tokens: int | None
) -> PairPlan | None:
    """Deal pairs as the matched rows with the same prompts, to run after them without these prompts.

    A prompt's last token runs again: what it gives predicts the completion's first.

    Args:
        matched: the plan of the matched rows.
        lengths_P: [P], tokens of each pair after the cut.
        prompt_P: [P], those of its prompt; 0 where it is another one after the cut.
        held_tokens: a rank's matched tokens at most whose graphs it can hold, where these are several micro-batches.
        max_tokens: tokens that run in a micro-batch at most; a pair with more stands alone.

    Returns:
        The plan, or None where a limit is exceeded.
    """
    reused_P = np.maximum(prompt_P - 1, 0)
    run_P = lengths_P - reused_P
    tokens_MR = [[int(matched.run_P[share].sum()) for share in shares] for shares in matched.plan]
    if len(tokens_MR) > 1 and max(map(sum, zip(*tokens_MR, strict=True))) > held_tokens:
        return None
    several = [share for shares in matched.plan for share in shares if len(share) > 1]
    if max_tokens is not None and any(run_P[share].sum() > max_tokens for share in several):
        return None
    return PairPlan(matched.plan, run_P, reused_P)


def slots(planned: PairPlan, layout: Layout) -> int:
    """Return the places for tokens that all ranks' forwards of a plan run through."""
    shares = [planned.run_P[share] for shares in planned.plan for share in shares if len(share)]
    sizes = [int(share.sum()) if layout.packed else len(share) * int(share.max()) for share in shares]
    sizes += [DUMMY_TOKENS] * (sum(map(len, planned.plan)) - len(shares))
    # Tokens are shared evenly.
    return sum(size + -size % layout.shared_by for size in sizes)


def _units(
    lengths_P: IntArray, prompt_P: IntArray, uncounted_P: IntArray, key_P: IntArray, most: int, max_tokens: float
) -> list[IntArray]:
    """Return the pairs by unit: of one prompt, up to `most` of them and `max_tokens`; see `plan_shared`."""
    units: list[list[int]] = []
    newest: dict[int, tuple[list[int], int]] = {}  # by key: a prompt's unit, and its tokens
    pairs = zip(*(size_P.tolist() for size_P in (lengths_P, prompt_P, uncounted_P, key_P)), strict=True)
    for p, (length, prompt, uncounted, key) in enumerate(pairs):
        unit, tokens = newest.get(key, ([], 0))
        tokens += length - uncounted
        if unit and prompt and len(unit) < most and tokens <= max_tokens:
            unit.append(p)
            newest[key] = unit, tokens
            continue
        units.append([p])
        if prompt:
            newest[key] = units[-1], length
    return [np.array(unit, dtype=np.int64) for unit in units]


def _reused(units: list[IntArray], prompt_P: IntArray) -> NDArray[np.int64]:
    reused_P = np.zeros(len(prompt_P), dtype=np.int64)
    for unit in units:
        reused_P[unit[1:]] = prompt_P[unit[1:]]
    return reused_P


def _pairs_of(units: list[IntArray], share: IntArray) -> IntArray:
    return np.concatenate([units[u] for u in share]) if len(share) else np.zeros(0, dtype=np.int64)
