"""Partners differ in prompt and in completion wherever a permutation can bring that about."""

import time
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from openkto.batches.pairing import collisions, fewest_collisions, pair_mismatched, unavoidable_collisions

keys = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=40).map(np.array)


def count(prompts, completions, partner):
    return int(collisions(prompts, completions, partner).sum())


def groupings(n):
    """Every way to put n rows into groups, as keys by first appearance."""
    found = [[0]]
    for _ in range(n - 1):
        found = [[*known, key] for known in found for key in range(max(known) + 2)]
    return [np.array(known) for known in found]


def check_against_brute_force(n, pairs_of_groupings):
    every_PN = np.array(list(permutations(range(n))))
    for prompts, completions in pairs_of_groupings:
        bad_PN = (prompts[every_PN] == prompts) | (completions[every_PN] == completions)
        fewest = int(bad_PN.sum(1).min())
        partner = pair_mismatched(prompts, completions)
        assert sorted(partner) == list(range(n))
        assert count(prompts, completions, partner) == fewest == fewest_collisions(prompts, completions)
        assert fewest == 1 or (partner != np.arange(n)).all()


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_no_permutation_of_a_small_batch_has_fewer_collisions(n):
    check_against_brute_force(n, ((p, c) for p in groupings(n) for c in groupings(n)))


@pytest.mark.parametrize("n", [6, 7])
def test_no_permutation_of_a_batch_drawn_at_random_has_fewer_collisions(n):
    random = np.random.default_rng(0)
    check_against_brute_force(n, (random.integers(0, random.integers(1, 5, (2, 1)), (2, n)) for _ in range(300)))


@given(keys)
def test_pairing_is_a_permutation_that_reaches_the_bound(keys):
    prompts, completions = keys.T
    partner = pair_mismatched(prompts, completions)
    assert sorted(partner) == list(range(len(keys)))
    assert count(prompts, completions, partner) == fewest_collisions(prompts, completions)


def test_rows_without_equal_texts_are_paired_by_rotation():
    assert pair_mismatched(np.array([10, 11, 12, 13]), np.arange(4)).tolist() == [3, 0, 1, 2]


def test_where_rotation_by_prompts_parts_equal_completions_too_it_serves():
    assert pair_mismatched(np.array([5, 5, 6, 7]), np.array([0, 1, 2, 3])).tolist() == [2, 3, 0, 1]
    # Rows of one prompt cannot be helped, and none is paired with itself.
    assert pair_mismatched(np.full(3, 7), np.arange(3)).tolist() == [2, 0, 1]


def test_flattened_pairs_never_get_the_other_answer_to_their_prompt():
    keys = np.repeat(np.arange(4), 2)
    assert (keys != keys[pair_mismatched(keys, np.arange(8))]).all()


def test_two_answers_to_distinct_prompts_are_exchanged_as_far_as_the_smaller_group_goes():
    random = np.random.default_rng(1)
    for share, expected in ((0.5, 0), (0.75, 32)):
        answers = random.permutation(np.arange(64) >= 64 * share).astype(int)
        assert count(np.arange(64), answers, pair_mismatched(np.arange(64), answers)) == expected


def test_both_answers_to_each_prompt_from_two_texts_are_parted_though_every_rotation_collides():
    prompts, answers = np.repeat(np.arange(30), 2), np.tile([0, 1], 30)
    assert count(prompts, answers, pair_mismatched(prompts, answers)) == 0


def test_what_cannot_be_parted_in_an_epoch_is_the_sum_over_its_batches():
    # 10 rows of which 8 have one answer: 5 and 3 of them in a batch give 5 + 1 at least, 4 and 4 give 3 + 3.
    answers = np.array([0] * 8 + [1, 2])
    assert unavoidable_collisions(np.arange(10), answers, 10, seed=0) == 6
    assert unavoidable_collisions(np.arange(10), np.arange(10), 5, seed=0) == 0
    assert unavoidable_collisions(np.arange(10), answers, 5, seed=0) == 6


def test_a_set_of_many_collisions_takes_no_minute():
    n = 20_000
    prompts, answers = np.repeat(np.arange(n // 2), 2), np.tile([0, 1], n // 2)
    started = time.perf_counter()
    assert count(prompts, answers, pair_mismatched(prompts, answers)) == 0
    assert time.perf_counter() - started < 20  # 1 s on a quiet core


@pytest.mark.parametrize(
    ("n", "prompt_share", "answer_share"), [(20_000, 0.7, 0.2), (3_000, 0.7, 0.7), (8_000, 0.5, 0.5)]
)
def test_a_set_in_which_one_prompt_and_one_answer_dominate_takes_no_minute(n, prompt_share, answer_share):
    random = np.random.default_rng(0)
    prompts, answers = (
        np.where(random.random(n) < share, 0, np.arange(1, n + 1)) for share in (prompt_share, answer_share)
    )
    started = time.process_time()
    assert count(prompts, answers, pair_mismatched(prompts, answers)) == fewest_collisions(prompts, answers)
    assert time.process_time() - started < 5  # below 1 s on a quiet core
