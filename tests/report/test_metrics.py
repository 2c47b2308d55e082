"""Metrics pool rows and counts; they never average averages."""

import numpy as np
import pytest

from openkto.models.loss import KTOLoss
from openkto.report.auc import area_under_curve
from openkto.report.metrics import BatchRows, MetricWindow


def batch(log_ratios, labels, z_ref=0.0, mean=None, weights=None):
    ratios = np.array(log_ratios, dtype=np.float64)
    row_weights = np.ones(len(ratios)) if weights is None else np.array(weights)
    scored = np.arange(1.0, len(ratios) + 1)
    return BatchRows(
        ratios - 10.0, ratios, np.array(labels), row_weights, scored, z_ref, z_ref if mean is None else mean
    )


def test_a_window_pools_rows_of_batches_of_different_size():
    window = MetricWindow(KTOLoss(beta=0.5))
    window.add(batch([2.0], [True], z_ref=1.0))
    window.add(batch([4.0, 6.0, -1.0], [True, True, False], z_ref=0.0, mean=-4.0))
    values = window.values()
    assert values["rewards/chosen"] == 0.5 * (2 + 4 + 6) / 3
    assert values["rewards/rejected"] == -0.5
    assert values["rewards/margins"] == 2.5
    assert values["logps/chosen"] == (2 + 4 + 6) / 3 - 10
    assert values["kl"] == 1 / 4
    assert values["kl_unclamped"] == (1.0 - 3 * 4.0) / 4
    assert values["rewards/accuracy"] == 1.0
    assert values["rewards/auc"] == 1.0
    sigmoid = 1 / (1 + np.exp(-0.5 * np.array([2 - 1.0, 4, 6, 1])))
    assert values["loss"] == pytest.approx(float((1 - sigmoid).mean()), rel=1e-12)


def test_a_class_without_rows_has_no_metric():
    window = MetricWindow(KTOLoss())
    window.add(batch([1.0, 2.0], [False, False]))
    values = window.values()
    assert "rewards/rejected" in values
    assert not {"rewards/chosen", "logps/chosen", "rewards/margins", "rewards/auc"} & values.keys()


def test_a_loss_without_z_ref_has_no_kl():
    window = MetricWindow(KTOLoss(loss_type="apo_zero_unpaired"))
    window.add(BatchRows(np.zeros(1), np.ones(1), np.array([True]), np.ones(1), np.ones(1), 0.0, None))
    assert not {"kl", "kl_unclamped"} & window.values().keys()


@pytest.mark.parametrize(
    ("rewards", "labels", "expected"),
    [
        ([3, 1, 2], [True, False, False], 1.0),
        ([0, 1, 2], [True, False, False], 0.0),
        ([1, 1], [True, False], 0.5),
        ([2, 1, 1, 0], [True, True, False, False], 3.5 / 4),
    ],
)
def test_auc_counts_a_tie_half(rewards, labels, expected):
    assert area_under_curve(np.array(rewards, dtype=np.float64), np.array(labels)) == expected


@pytest.mark.parametrize(("loss_type", "scale"), [("kto", 1.0), ("kto_length_normalized", 4.0)])
def test_what_round_off_makes_of_rewards_before_the_first_update_reads_as_ties(loss_type, scale):
    noise = np.array([4e-5, -3e-5, 2e-5, 5e-5]) / scale  # of log-probabilities of 60 to 90 nats, of 4 tokens
    log_probs = np.array([-60.0, -70.0, -80.0, -90.0])
    labels = np.array([True, True, False, False])
    for factor, auc, accuracy in ((1, 0.5, 0.0), (10, 0.25, 0.25)):
        window = MetricWindow(KTOLoss(loss_type=loss_type))
        point = 2e-5 * factor / scale
        scored = np.full(4, 4.0)
        window.add(BatchRows(log_probs, factor * noise, labels, np.ones(4), scored, point, point))
        assert (window.values()["rewards/auc"], window.values()["rewards/accuracy"]) == (auc, accuracy)
        assert window.values()["rewards/chosen"] == pytest.approx(0.1 * factor * noise[:2].mean(), rel=1e-12)


def test_accuracy_is_about_the_reference_point_not_about_zero():
    window = MetricWindow(KTOLoss())
    window.add(batch([0.5, 0.5], [True, False], z_ref=1.0))
    assert window.values()["rewards/accuracy"] == 0.5


def test_the_loss_is_weighted_by_row_and_divided_by_their_number():
    window = MetricWindow(KTOLoss(beta=1.0))
    window.add(batch([0.0, 0.0, 0.0], [True, True, False], weights=[3.0, 0.0, 1.0]))
    values = window.values()
    assert values["loss"] == 0.5 * (3 + 0 + 1) / 3
    assert values["rewards/accuracy"] == 0.0
    assert "sft_loss" not in values


def test_the_sft_loss_pools_tokens_over_the_windows_batches():
    window = MetricWindow(KTOLoss(sft_loss_coef=0.1))
    window.add(batch([1.0, 2.0, 3.0], [True, False, True]))  # log-probabilities -9 and -7, of 1 and 3 tokens
    window.add(batch([4.0], [True]))  # -6, of 1 token
    assert window.values()["sft_loss"] == pytest.approx((9 + 7 + 6) / 5, rel=1e-12)
    window = MetricWindow(KTOLoss(sft_loss_coef=0.1))
    window.add(batch([1.0], [False]))
    assert "sft_loss" not in window.values()


def test_the_shift_is_a_reward_and_accuracy_is_about_it():
    window = MetricWindow(KTOLoss(beta=0.5, loss_type="bco"))
    window.add(batch([1.0], [True], z_ref=2.0))
    window.add(batch([1.0, 1.0, 1.0], [True, True, False], z_ref=0.0))
    values = window.values()
    assert values["rewards/shift"] == 0.5 * 2.0 / 4
    assert values["rewards/accuracy"] == 2 / 4
    assert "kl" not in values
