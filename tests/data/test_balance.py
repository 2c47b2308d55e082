"""The ratio of weights x counts, and auto."""

import pytest

from openkto.data.balance import describe_balance, resolve_weights


def test_auto_raises_the_smaller_class_until_the_ratio_is_one():
    assert resolve_weights("auto", 1.0, 10, 100) == (10.0, 1.0)
    assert resolve_weights(1.0, "auto", 100, 10) == (1.0, 10.0)
    assert resolve_weights("auto", 2.0, 10, 20) == (4.0, 2.0)


def test_auto_is_never_below_one():
    assert resolve_weights("auto", 1.0, 100, 10) == (1.0, 1.0)
    assert resolve_weights(1.0, "auto", 10, 100) == (1.0, 1.0)


def test_auto_for_a_class_without_rows_is_one():
    assert resolve_weights("auto", 1.0, 0, 100) == (1.0, 1.0)
    assert resolve_weights(1.0, "auto", 100, 0) == (1.0, 1.0)


def test_numbers_are_kept():
    assert resolve_weights(0.5, 2.0, 3, 100) == (0.5, 2.0)


def test_auto_for_both_is_a_mistake_of_the_program():
    with pytest.raises(AssertionError, match="one is set by the other"):
        resolve_weights("auto", "auto", 1, 2)


def test_counts_and_ratio_are_said():
    line, warning = describe_balance(1.2, 1.0, 100, 100)
    assert line == "desirable 100, undesirable 100, ratio (1.2 * 100) / (1 * 100) = 1.2"
    assert warning is None


@pytest.mark.parametrize(
    ("desirable", "undesirable", "suggestion"),
    [
        (10, 100, "--desirable_loss_weight between 10 and 13.33"),
        (100, 10, "--undesirable_loss_weight between 7.5 and 10"),
    ],
)
def test_a_ratio_out_of_range_is_warned_of_with_weights_that_mend_it(desirable, undesirable, suggestion):
    _, warning = describe_balance(1.0, 1.0, desirable, undesirable)
    assert warning is not None
    assert "is outside [1, 4/3], which the KTO paper (arXiv:2402.01306v1) recommends" in warning
    assert suggestion in warning


@pytest.mark.parametrize(("desirable", "undesirable"), [(3, 3), (4, 3)])
def test_both_ends_of_the_range_are_in_it(desirable, undesirable):
    assert describe_balance(1.0, 1.0, desirable, undesirable)[1] is None


def test_a_weight_from_auto_is_never_warned_of():
    for n in range(1, 50):
        weights = resolve_weights("auto", 1.0, n, 50)
        assert describe_balance(*weights, n, 50)[1] is None


def test_an_absent_class_is_warned_of():
    assert describe_balance(1.0, 1.0, 5, 0) == (
        "desirable 5, undesirable 0",
        "the data has no undesirable rows: KTO needs both classes. Check the labels.",
    )


@pytest.mark.parametrize(("counts", "name"), [((5, 0), "undesirable"), ((0, 5), "desirable")])
def test_a_class_that_was_too_long_is_not_blamed_on_the_labels(counts, name):
    left_out = (0, 7) if name == "undesirable" else (7, 0)
    assert describe_balance(1.0, 1.0, *counts, left_out)[1] == (
        f"all 7 {name} rows are longer than --max_len and left out: KTO needs both classes."
        " Raise --max_len, or change --truncation."
    )
    assert "Check the labels" in str(describe_balance(1.0, 1.0, *counts, left_out[::-1])[1])
