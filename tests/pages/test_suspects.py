import numpy as np
import pytest

from openkto.pages.run_files import RowRewards
from openkto.pages.suspects import suspects_of


def rewards(lines):
    """Return lines (step, row, is_desirable, margin) as rewards."""
    step, row, is_desirable, margin = (np.array(column) for column in zip(*lines, strict=True))
    reward = np.where(is_desirable, margin, -margin)
    return RowRewards(step, row, is_desirable.astype(bool), reward.astype(float), margin.astype(float))


def test_rows_on_the_wrong_side_come_first_by_how_strange_they_are_in_their_class():
    margins = {0: 1.0, 1: 0.8, 2: -0.5, 3: 1.2, 4: 2.0, 5: -0.2, 6: 2.2, 7: 1.9}
    found = suspects_of(rewards([(1, row, row < 4, margin) for row, margin in margins.items()]), 10)
    assert [(one.row, one.is_desirable) for one in found] == [(5, False), (2, True)]
    assert found[1].margin == pytest.approx(-0.5)
    # The desirable rows' middle is 0.9 and their spread the median of 0.1, 0.1, 0.3, 1.4.
    assert found[1].strangeness == pytest.approx((0.9 + 0.5) / 0.2)


def test_late_steps_count_and_a_row_that_was_seen_early_only_counts_by_its_last_visit():
    lines = [(1, 0, True, -9.0), (10, 0, True, 1.0)]  # learned since
    lines += [(1, 1, True, 9.0), (2, 1, True, -1.0)]  # not seen late
    lines += [(10, 2, True, 1.1), (10, 3, True, 0.9), (10, 4, True, 1.2)]
    assert [(one.row, one.margin) for one in suspects_of(rewards(lines), 10)] == [(1, -1.0)]


def test_label_errors_planted_in_a_twentieth_of_overlapping_classes_are_found_with_a_precision_of_seven_tenths():
    chance = np.random.default_rng(0)
    desirable = np.arange(400) < 200
    planted = set(chance.choice(400, 20, replace=False).tolist())
    lines = []
    for step in range(1, 41):  # each row four times; what is learned grows with the steps, and rows differ by noise
        for row in chance.permutation(400)[:40].tolist():
            learned = 0.1 * step * (0.2 if desirable[row] else 1.0)  # rude rows are learned more, as in the demo's run
            margin = learned * (-1 if row in planted else 1) + chance.normal() * 0.3 * learned
            lines.append((step, row, bool(desirable[row]), margin))
    found = [one.row for one in suspects_of(rewards(lines), 20)]
    assert len(set(found) & planted) >= 14


def test_no_more_are_shown_than_asked_for_and_none_that_is_on_its_labels_side():
    lines = [(1, row, True, margin) for row, margin in enumerate((-1.0, -2.0, -3.0, 0.1, 5.0, 6.0, 7.0))]
    assert [one.row for one in suspects_of(rewards(lines), 2)] == [2, 1]
    assert len(suspects_of(rewards(lines), 10)) == 3
