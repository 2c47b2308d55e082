"""Whose completion each prompt of a batch is paired with for z_ref: a pure function of the batch.

A pair collides where it has the prompt or the completion of its own row: z_ref would take in a row's own reward, or the
other answer's to the same prompt. Keys are equal where the tokens are.

Shapes:  N = rows in the global batch, n = rows in the data set.
Source:  the KL estimate of arXiv:2402.01306v4, section 4.1, with partners kept apart from their own prompt and text.
"""

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from openkto.batches.batch import IntArray, batch_bounds, epoch_order

NEARBY, WIDER = 256, 4


def pair_mismatched(prompt_keys_N: IntArray, completion_keys_N: IntArray) -> IntArray:
    """Return s, [N]: row i's prompt is paired with the completion of row s[i].

    s is a permutation, so the mismatched completions are exactly the batch's own, and it has the fewest collisions
    possible. A rotation that parts equal prompts serves where it does; see `_rotate`. Elsewhere the larger groups, of
    prompts or of completions, are parted by rotation, and what still collides is exchanged for other partners.
    """
    fewest = fewest_collisions(prompt_keys_N, completion_keys_N)
    partner_N = _rotate(prompt_keys_N)
    if collisions(prompt_keys_N, completion_keys_N, partner_N).sum() == fewest:
        return partner_N
    larger_N = prompt_keys_N
    if _largest_group(completion_keys_N) > _largest_group(prompt_keys_N):
        larger_N, partner_N = completion_keys_N, _rotate(completion_keys_N)
    _part(partner_N, larger_N, prompt_keys_N, completion_keys_N, fewest)
    return partner_N


def collisions(
    prompt_keys_N: IntArray, completion_keys_N: IntArray, partner_N: IntArray, rows: list[int] | slice = slice(None)
) -> NDArray[np.bool_]:
    """Return which of the rows, all by default, have a partner with their own prompt or completion."""
    partner = partner_N[rows]
    has_own_prompt = prompt_keys_N[rows] == prompt_keys_N[partner]
    has_own_text = completion_keys_N[rows] == completion_keys_N[partner]
    return np.asarray(has_own_prompt | has_own_text)


def fewest_collisions(prompt_keys_N: IntArray, completion_keys_N: IntArray) -> int:
    """Return how many pairs must collide in any permutation: max(0, 2g - N), g the largest group of either kind.

    By Hall's theorem it is the largest |A| + |B| - N over sets of rows A and of partners B that all collide with each
    other. Such are a prompt's rows with each other, a completion's rows with each other, and the rows of a prompt or a
    completion with those that have both; none of the last is worse than the larger of the first two.
    """
    largest = max(_largest_group(prompt_keys_N), _largest_group(completion_keys_N))
    return max(0, 2 * largest - len(prompt_keys_N))


def unavoidable_collisions(
    prompt_keys_n: IntArray, completion_keys_n: IntArray, train_batch_size: int, seed: int
) -> int:
    """Return how many pairs of the first epoch collide however they are made."""
    order = epoch_order(len(prompt_keys_n), seed, 0)
    batches = [order[a:b] for a, b in pairwise(batch_bounds(len(order), train_batch_size))]
    return sum(fewest_collisions(prompt_keys_n[index_N], completion_keys_n[index_N]) for index_N in batches)


def _rotate(keys_N: IntArray) -> IntArray:
    """Return the partners of a rotation with the fewest pairs of equal keys, [N].

    Rotation by one serves unless it pairs equal keys. Then the rows are sorted stably by the first appearance of their
    key and rotated by the size g of the largest group, which leaves max(0, 2g - N). A batch of a single key stays with
    rotation by one, so that no row is paired with itself.
    """
    n = len(keys_N)
    by_one_N = (np.arange(n, dtype=np.int64) - 1) % max(n, 1)
    if not np.any(keys_N == keys_N[by_one_N]):
        return by_one_N
    _, first_seen, group_N, size = np.unique(keys_N, return_index=True, return_inverse=True, return_counts=True)
    if len(size) == 1:
        return by_one_N
    grouped_N = np.argsort(first_seen[group_N], kind="stable")
    partner_N = np.empty(n, dtype=np.int64)
    partner_N[grouped_N] = np.roll(grouped_N, int(size.max()))
    return partner_N


def _largest_group(keys_N: IntArray) -> int:
    return int(np.unique(keys_N, return_counts=True)[1].max(initial=0))


def _part(
    partner_N: IntArray, larger_N: IntArray, prompt_keys_N: IntArray, completion_keys_N: IntArray, fewest: int
) -> None:
    """Exchange partners, in place, until only as few collide as must.

    Args:
        larger_N: the keys of the kind with the largest group, which `partner_N` parts as far as can be.
    """
    exchange = _Exchange(partner_N, prompt_keys_N, completion_keys_N)
    is_bad_N, everywhere = exchange.is_bad_N, np.arange(len(partner_N))
    is_open_N = np.ones(len(partner_N), dtype=np.bool_)
    hopeless: set[int] = set()
    rows = np.flatnonzero(is_bad_N)
    # What a group of over half the batch keeps to itself cannot be helped, as a rule: such rows come last.
    for i in rows[np.argsort(larger_N[rows] == larger_N[partner_N[rows]], kind="stable")].tolist():
        if np.count_nonzero(is_bad_N) == fewest:
            break
        # Most exchanges are found near the row or its partner; to look at all partners for each row would take minutes
        # for a large set, so the look widens.
        width, seen = NEARBY, None
        while is_bad_N[i] and int(exchange.both_N[i]) not in hopeless:
            starts = [i] if width >= len(partner_N) else [i, partner_N[i]]
            unseen = np.concatenate([(everywhere[:width] + start) % len(partner_N) for start in starts])
            seen = exchange.along_chain(i, unseen[is_open_N[unseen]])
            if width >= len(partner_N):
                break
            width *= WIDER
        if is_bad_N[i] and seen is not None:
            # What can be reached from a row that finds no end leads to none in any later search either.
            is_open_N[seen] = False
            hopeless.add(int(exchange.both_N[i]))
    bad = np.flatnonzero(is_bad_N).tolist()
    for i in bad:
        other = next((k for k in bad if k != i), i)
        if partner_N[i] == i:
            partner_N[[i, other]] = partner_N[[other, i]]


class _Exchange:
    """Exchanges partners among the rows of a batch, in place, along chains.

    The shortest augmenting path of bipartite matching: i takes a partner from a row that takes another's, and so on up
    to a partner that collides with its holder.
    """

    def __init__(self, partner_N: IntArray, prompt_keys_N: IntArray, completion_keys_N: IntArray) -> None:
        self.partner_N, self.holder_N = partner_N, np.argsort(partner_N)
        self.taker_N = np.empty_like(partner_N)
        self.prompt_keys_N, self.completion_keys_N = prompt_keys_N, completion_keys_N
        self.is_bad_N = collisions(prompt_keys_N, completion_keys_N, partner_N)
        prompts_N, completions_N = (np.unique(k, return_inverse=True)[1] for k in (prompt_keys_N, completion_keys_N))
        self.both_N = np.unique(prompts_N * len(partner_N) + completions_N, return_inverse=True)[1]
        # Keys from 0 on, how often each is unseen (zeros between looks), and what that says of partners that fit.
        self.counted = [
            (k, np.zeros(len(k), dtype=np.int64), n)
            for k, n in ((prompts_N, -1), (completions_N, -1), (self.both_N, 1))
        ]

    def along_chain(self, i: int, unseen: IntArray) -> IntArray | None:
        """Give row i a partner without collision if a chain leads to one; return the partners seen where none does.

        Args:
            unseen: the partners to look through.
        """
        all_unseen, queue = unseen, np.array([i])
        while len(queue := self._that_reach(unseen, queue)):
            row, queue = queue[0], queue[1:]
            fits = self.prompt_keys_N[unseen] != self.prompt_keys_N[row]
            fits &= self.completion_keys_N[unseen] != self.completion_keys_N[row]
            found, unseen = unseen[fits], unseen[~fits]
            self.taker_N[found] = row
            holders = self.holder_N[found]
            free = found[self.is_bad_N[holders]]
            if len(free):
                self._exchange(i, int(free[0]))
                return None
            queue = np.concatenate([queue, holders])
        return np.setdiff1d(all_unseen, unseen, assume_unique=True)

    def _that_reach(self, unseen: IntArray, rows: IntArray) -> IntArray:
        """Return the rows, in their order, that some unseen partner fits."""
        reached = np.full(len(rows), len(unseen))
        for keys_N, counts, sign in self.counted:
            np.add.at(counts, keys_N[unseen], 1)
            reached += sign * counts[keys_N[rows]]
            counts[keys_N[unseen]] = 0
        return rows[reached > 0]

    def _exchange(self, i: int, end: int) -> None:
        """Make a chain's exchanges; the holder of its end gets what i gives up."""
        given_up, last = int(self.partner_N[i]), int(self.holder_N[end])
        changed = [last]
        while changed[-1] != i or len(changed) == 1:
            row = int(self.taker_N[end])
            before = int(self.partner_N[row])
            self.partner_N[row], self.holder_N[end], end = end, row, before
            changed.append(row)
        if last != i:
            self.partner_N[last], self.holder_N[given_up] = given_up, last
        self.is_bad_N[changed] = collisions(self.prompt_keys_N, self.completion_keys_N, self.partner_N, changed)
