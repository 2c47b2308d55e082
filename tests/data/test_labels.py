"""Labels: what each value means, and one convention a file."""

from decimal import Decimal

import numpy as np
import pandas as pd
import pytest

from openkto.data.json_files import parse_json
from openkto.data.labels import LabelReader
from openkto.data.problems import BadRow
from openkto.errors import DataError


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


@pytest.mark.parametrize("value", ["maybe", None, float("nan"), "", [], {}, 10**400, b"1", "1,000", "0_1", "1 0"])
def test_anything_else_is_an_error_with_its_place_and_value(value):
    with pytest.raises(BadRow) as caught:
        LabelReader().read("data/train.jsonl:17", value)
    message = str(caught.value)
    assert message.startswith("data/train.jsonl:17: label must be true or false, 1 or 0, 1 or -1, or a word such as")
    assert message.endswith(", or pass --on_bad_rows skip to leave such rows out.")
    assert caught.value.kind == "label"


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("NaN", "got NaN. Fix the row, or pass --on_bad_rows skip"),
        ("null", "got None. Fix the row, or"),
        ("Infinity", "got Infinity, or a number too large for a float. Read scores with"),
        ("-1e999", "got -Infinity, or a number too large for a float. Read scores with"),
        ('"nan"', "got 'nan'. Say what other words mean with --label_map"),
    ],
)
def test_a_label_that_is_no_number_is_said_as_the_file_has_it(value, says):
    with pytest.raises(DataError) as caught:
        LabelReader().read("f:1", parse_json(value))
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "missing", [None, float("nan"), np.float32("nan"), Decimal("NaN"), Decimal("sNaN"), pd.NA, pd.NaT], ids=repr
)
def test_a_label_that_is_missing_in_any_librarys_way_is_one_that_is_missing(missing):
    with pytest.raises(BadRow, match="label must be true or false"):
        LabelReader().read("f:1", missing)
    assert LabelReader({"null": None, "1": True}).read("f:1", missing) is None
    assert LabelReader(threshold=(4.0,)).read("f:1", missing) is None


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
    assert reader.read("f:1", None) is reader.read("f:1", float("nan")) is None
    for value in (True, "good"):
        with pytest.raises(BadRow, match="label must be a number to be read by --label_threshold"):
            reader.read("f:1", value)


@pytest.mark.parametrize("values", [[5], [1, 0, 2], ["1", "4,5"], [0, 0.5], [1, 0, -1], ["1", "-1", "0"]])
def test_numbers_of_which_one_is_a_score_stop_the_start_also_where_bad_rows_are_skipped(values):
    reader = LabelReader(name="stars")
    for number, value in enumerate(values[:-1]):
        reader.read(f"f:{number}", value)
    rule = "f:9: where stars is a number, it must be 1 or 0, or 1 or -1, in the whole file; got"
    with pytest.raises(DataError, match=rule) as caught:
        reader.read("f:9", values[-1])
    assert not isinstance(caught.value, BadRow)
    assert "Read scores with --label_threshold, such as --label_threshold 4 2" in str(caught.value)
    assert "--label_map 1=true 0=none -1=false" in str(caught.value)


def test_a_number_among_words_is_one_bad_row():
    reader = LabelReader()
    reader.read("f:1", "good")
    with pytest.raises(BadRow, match="Read scores with --label_threshold, such as --label_threshold 4, or"):
        reader.read("f:2", "5")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("thumbs_down", 1),
        ("thumbsDown", False),
        ("meta.is_bad", "yes"),
        ("Downvote", "TRUE"),
        ("hallucination", 1),
        ("not_helpful", "0"),
    ],
)
def test_a_column_that_is_called_after_undesirable_answers_needs_its_values_explained(name, value):
    with pytest.raises(DataError, match=rf"f:1: {name} is called as if .* Pass --label_map 1=false 0=true") as caught:
        LabelReader(name=name).read("f:1", value)
    assert not isinstance(caught.value, BadRow)
    assert LabelReader({"1": False}, name=name).read("f:1", 1) is False


@pytest.mark.parametrize(
    ("name", "value"), [("thumbs_down", "up"), ("good_or_bad", 1), ("up_down", "yes"), ("helpful", "no"), ("notes", 1)]
)
def test_a_column_that_says_which_or_names_both_sides_is_read(name, value):
    LabelReader(name=name).read("f:1", value)


def test_a_label_of_another_field_is_named_by_it():
    for settings, rule in (({}, "must be true or false"), ({"meanings": {"x": True}}, "must be one that --label_map")):
        with pytest.raises(BadRow, match=f"f:1: feedback {rule}"):
            LabelReader(**settings, name="feedback").read("f:1", "n/a")
