"""The objective in numbers worked out by hand or in float64."""

import math

import pytest
import torch

from openkto.models.loss import KTOLoss, kto_losses, margins, reference_point


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


LOG_RATIOS = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
LABELS = torch.tensor([True, False, False])
Z_REF = torch.tensor(0.25, dtype=torch.float64)


def test_losses_are_lambda_times_one_minus_sigmoid_of_the_signed_margin():
    losses = kto_losses(LOG_RATIOS, LABELS, Z_REF, beta=0.5, desirable_weight=1.5, undesirable_weight=0.75)
    expected = [
        1.5 * (1 - sigmoid(0.5 * (1.0 - 0.25))),
        0.75 * (1 - sigmoid(0.5 * (0.25 + 2.0))),
        0.75 * (1 - sigmoid(0.5 * (0.25 - 0.5))),
    ]
    assert losses.tolist() == pytest.approx(expected, rel=1e-12)


def test_at_the_reference_every_loss_is_half_its_weight():
    losses = kto_losses(torch.zeros(2), torch.tensor([True, False]), torch.tensor(0.0), beta=0.1, desirable_weight=3.0)
    assert losses.tolist() == [1.5, 0.5]


def test_the_gradient_raises_desirable_and_lowers_undesirable_rows():
    log_ratio = torch.zeros(2, requires_grad=True)
    kto_losses(log_ratio, torch.tensor([True, False]), torch.tensor(0.0), beta=0.2).sum().backward()
    assert log_ratio.grad.tolist() == pytest.approx([-0.05, 0.05])


def test_flipping_one_label_changes_no_other_rows_loss():
    flipped = torch.tensor([True, True, False])
    before = kto_losses(LOG_RATIOS, LABELS, Z_REF, beta=0.5)
    after = kto_losses(LOG_RATIOS, flipped, Z_REF, beta=0.5)
    assert (before == after).tolist() == [True, False, True]


def test_z_ref_is_clamped_after_the_mean():
    assert float(reference_point(torch.tensor(-2.0 + 3.0), torch.tensor(8.0))) == 0.125
    assert float(reference_point(torch.tensor(-1.0), torch.tensor(8.0))) == 0.0


def test_apo_zero_for_unpaired_rows_is_kto_with_the_reference_point_zero():
    loss = KTOLoss(beta=0.5, loss_type="apo_zero_unpaired")
    assert not loss.needs_z_ref
    expected = [1 - sigmoid(0.5 * 1.0), sigmoid(0.5 * -2.0), sigmoid(0.5 * 0.5)]
    assert loss(LOG_RATIOS, LABELS, torch.zeros((), dtype=torch.float64)).tolist() == pytest.approx(expected, rel=1e-12)


def test_margins_are_positive_on_the_right_side_of_the_reference_point():
    assert margins(LOG_RATIOS, LABELS, Z_REF).tolist() == [0.75, 2.25, -0.25]


def test_labels_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"must be \[N\] and z_ref a scalar; got \(3,\), \(3, 1\)"):
        kto_losses(LOG_RATIOS, LABELS[:, None], Z_REF, beta=0.1)


def test_saturated_margins_stay_finite():
    losses = kto_losses(torch.tensor([1e6, -1e6]), torch.tensor([True, True]), torch.tensor(0.0), beta=1.0)
    assert losses.tolist() == [0.0, 1.0]
