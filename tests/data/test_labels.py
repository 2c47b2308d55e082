"""Labels: what each value means, and one convention a file."""

from decimal import Decimal

import numpy as np
import pytest

from openkto.data.labels import LabelReader
from openkto.data.problems import BadRow


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (True, True), (False, False), ("true", True), ("False", False), (" TRUE ", True),
        (1, True), (0, False), (-1, False), (1.0, True), (0.0, False), (-1.0, False),
        ("1", True), ("0", False), ("-1", False), ("1.0", True), ("1.00", True), ("0,0", False), ("\u22121", False),
        ("\uff11", True), (Decimal("0.0"), False),
        ("good", True), ("BAD", False), ("desirable", True), ("undesirable", False), ("chosen", True),
        ("rejected", False), ("Yes", True), ("no", False), ("up", True), ("down", False), ("positive", True),
        ("negative", False), ("like", True), ("dislike", False), ("thumbs_up", True), ("thumbs_down", False),
        ("\U0001f44d", True), ("\U0001f44e", False), (np.bool_(False), False), (np.int64(1), True),
    ],
)  # fmt: skip
def test_a_label_says_what_it_says(value, expected):
    assert LabelReader().read("f:1", value) is expected


@pytest.mark.parametrize(
    "value", ["maybe", None, 0.5, 2, float("nan"), "", "2", [], {}, 10**400, b"1", "1,000", "0_1", "1 0"]
)
def test_anything_else_is_an_error_with_its_place_and_value(value):
    with pytest.raises(BadRow) as caught:
        LabelReader().read("data/train.jsonl:17", value)
    message = str(caught.value)
    assert message.startswith("data/train.jsonl:17: label must be true or false, 1 or 0, 1 or -1, or a word such as")
    assert message.endswith(", or pass --on_bad_rows skip to leave such rows out.")
    assert caught.value.kind == "label"


def test_a_label_that_is_an_object_is_named_by_the_field_inside_it():
    with pytest.raises(BadRow, match=r"Name the field inside it with a dot, as in --label_key label\.score, or pass"):
        LabelReader().read("f:1", {"score": 1, "by": "me"})


@pytest.mark.parametrize(("value", "expected"), [("4,5", True), ("3,9", False), (Decimal("4.0"), True), ("4e0", True)])
def test_scores_are_numbers_however_they_are_written(value, expected):
    assert LabelReader(threshold=(4.0,)).read("f:1", value) is expected


def test_a_score_that_may_be_read_in_two_ways_is_a_bad_row():
    with pytest.raises(BadRow, match="label must be a number to be read by --label_threshold; got '1,000'"):
        LabelReader(threshold=(4.0,)).read("f:1", "1,000")


def test_the_sentence_quotes_the_value():
    with pytest.raises(BadRow, match=r"; got 'maybe'\. Say what other words mean with --label_map"):
        LabelReader().read("f:1", "maybe")


@pytest.mark.parametrize(
    ("values", "first"),
    [
        ([1, 0, -1], "f:1 has 0"),
        ([1, -1, 0], "f:1 has -1"),
        ([True, 0], "f:0 has True"),
        (["good", "true"], "f:0 has 'good'"),
        ([0, "no"], "f:0 has 0"),
    ],
)
def test_a_second_convention_is_an_error_that_names_the_first(values, first):
    reader = LabelReader()
    for number, value in enumerate(values[:-1]):
        reader.read(f"f:{number}", value)
    with pytest.raises(BadRow) as caught:
        reader.read("f:9", values[-1])
    assert str(caught.value) == (
        f"f:9: labels of one file must follow one convention ({first}); got {values[-1]!r}."
        " Write all labels of the file in one way, or pass --on_bad_rows skip to leave such rows out."
    )


@pytest.mark.parametrize("values", [[1, 1, 0, "1"], [1, -1, 1.0, "-1"], [True, "false"], ["good", "no", "Chosen"]])
def test_one_convention_may_be_spelt_in_several_ways(values):
    reader = LabelReader()
    for value in values:
        reader.read("f:0", value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("Thumbs Up", True), ("thumbs-down", False), ("thumbsUp", True), ("\U0001f44d\U0001f3fd", True),
        ("\U0001f44e\ufe0f", False), ("upvote", True), ("Downvoted", False), ("accepted", True), ("incorrect", False),
        ("Y", True), ("n", False), ("t", True), ("f", False),
    ],
)  # fmt: skip
def test_words_are_compared_without_case_marks_and_skin_tones(value, expected):
    assert LabelReader().read("f:1", value) is expected


def test_a_map_says_what_values_mean_and_nothing_else_does():
    reader = LabelReader({"works well": True, "1": False, "null": None})
    assert [reader.read("f:1", value) for value in (" Works Well", 1, 1.0, "1", None)] == [
        True,
        False,
        False,
        False,
        None,
    ]
    with pytest.raises(BadRow, match=r"label must be one that --label_map names \(works well, 1, null\); got 'good'"):
        reader.read("f:2", "good")


@pytest.mark.parametrize(
    ("threshold", "expected"),
    [
        ((4,), [False, False, False, True, True]),
        ((4, 2), [False, False, None, True, True]),
        ((2, 4), [False, False, None, True, True]),
    ],
)
def test_a_threshold_reads_scores(threshold, expected):
    reader = LabelReader(threshold=threshold)
    assert [reader.read("f:1", score) for score in (1, "2", 3.0, "4.0", 5)] == expected
    assert reader.read("f:1", None) is None
    for value in (True, "good", float("nan")):
        with pytest.raises(BadRow, match="label must be a number to be read by --label_threshold"):
            reader.read("f:1", value)


def test_a_score_without_a_threshold_names_the_flag():
    with pytest.raises(BadRow, match="Read scores with --label_threshold"):
        LabelReader().read("f:1", 5)


def test_a_label_of_another_field_is_named_by_it():
    for settings, rule in (({}, "must be true or false"), ({"meanings": {"x": True}}, "must be one that --label_map")):
        with pytest.raises(BadRow, match=f"f:1: feedback {rule}"):
            LabelReader(**settings, name="feedback").read("f:1", "n/a")
