"""The one rule for too long rows."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from openkto.data.truncation import cut, is_left_out, kept_lengths

BOS = 99


def cut_lists(prompt, completion, max_len, truncation, bos=None):
    return cut(prompt, completion, [True] * len(completion), max_len=max_len, truncation=truncation, bos_token_id=bos)[
        :2
    ]


def test_completion_mode_cuts_the_end_and_adds_nothing():
    assert cut_lists([1, 2, 3], [4, 5, 6, 7], 5, "completion") == ([1, 2, 3], [4, 5])


def test_prompt_mode_cuts_the_start_of_the_prompt():
    assert cut_lists([1, 2, 3], [4, 5, 6, 7], 5, "prompt") == ([3], [4, 5, 6, 7])


def test_prompt_mode_keeps_bos_and_one_token_and_then_cuts_the_completion():
    assert cut_lists([BOS, 1, 2, 3], [4, 5], 4, "prompt", BOS) == ([BOS, 3], [4, 5])
    assert cut_lists([BOS, 1, 2, 3], [4, 5, 6, 7], 4, "prompt", BOS) == ([BOS, 3], [4, 5])


def test_a_first_token_that_is_not_bos_is_not_kept():
    assert cut_lists([1, 2, 3], [4, 5], 3, "prompt", BOS) == ([3], [4, 5])


def test_the_mask_is_cut_with_the_completion():
    ids = cut([1], [2, 3, 4], [True, False, True], max_len=3, truncation="completion", bos_token_id=None)
    assert ids == ([1], [2, 3], [True, False])


def test_a_mismatched_pair_in_drop_mode_has_its_completion_cut():
    assert cut_lists([1, 2, 3], [4, 5, 6, 7], 5, "drop") == ([1, 2, 3], [4, 5])


@pytest.mark.parametrize(
    ("truncation", "expected"),
    [("completion", [False, False, True]), ("prompt", [False] * 3), ("drop", [False, True, True])],
)
def test_rows_are_left_out_where_nothing_could_be_scored_or_when_asked(truncation, expected):
    prompt_lengths, completion_lengths = np.array([3, 4, 5]), np.array([2, 2, 2])
    left_out = is_left_out(prompt_lengths, completion_lengths, max_len=5, truncation=truncation)
    assert left_out.tolist() == expected


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_matched_and_mismatched_end_the_same_way_around_max_len(extra):
    completion = list(range(10, 15 + extra))
    for prompt in ([1, 2, 3], [4, 5, 6]):
        assert cut_lists(prompt, completion, 8, "completion") == (prompt, completion[:5])


@given(
    prompt_length=st.integers(1, 30),
    completion_length=st.integers(1, 30),
    max_len=st.integers(3, 40),
    truncation=st.sampled_from(["completion", "prompt", "drop"]),
    has_bos=st.booleans(),
)
def test_a_cut_is_never_empty_never_too_long_and_has_the_length_that_was_planned(
    prompt_length, completion_length, max_len, truncation, has_bos
):
    lengths = np.array([prompt_length]), np.array([completion_length])
    # The completion may come from another row, so only the prompt's room counts here.
    if is_left_out(lengths[0], np.array([1]), max_len=max_len, truncation=truncation)[0]:
        return
    prompt = ([BOS] if has_bos else [0]) + list(range(1, prompt_length))
    completion = list(range(100, 100 + completion_length))
    cut_prompt, cut_completion = cut_lists(prompt, completion, max_len, truncation, BOS)
    total = len(cut_prompt) + len(cut_completion)
    assert total == min(prompt_length + completion_length, max_len)
    kept = kept_lengths(*lengths, max_len=max_len, truncation=truncation)
    assert total == kept[0][0] + kept[1][0]
    assert cut_completion == completion[: len(cut_completion)] != []
    assert cut_prompt[0] == prompt[0] or not has_bos
    head = 1 if has_bos else 0
    assert len(cut_prompt) >= min(prompt_length, head + 1)
    assert cut_prompt[head:] == prompt[prompt_length - (len(cut_prompt) - head) :]
    if truncation != "prompt":
        assert cut_prompt == prompt
