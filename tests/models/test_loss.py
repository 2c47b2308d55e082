"""The objective in numbers worked out by hand or in float64."""

import math
from functools import partial

import pytest
import torch

from openkto.models.loss import (
    KTOLoss,
    humanline_log_ratios,
    kto_losses,
    length_normalized_log_ratios,
    margins,
    reference_point,
    sft_loss,
)


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
    assert not loss.facts.needs_z_ref
    expected = [1 - sigmoid(0.5 * 1.0), sigmoid(0.5 * -2.0), sigmoid(0.5 * 0.5)]
    assert loss(LOG_RATIOS, LABELS, torch.zeros((), dtype=torch.float64)).tolist() == pytest.approx(expected, rel=1e-12)


def test_margins_are_positive_on_the_right_side_of_the_reference_point():
    assert margins(LOG_RATIOS, LABELS, Z_REF).tolist() == [0.75, 2.25, -0.25]


def test_labels_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"must be \[N\], the reference point a scalar; got \(3,\), \(3, 1\)"):
        kto_losses(LOG_RATIOS, LABELS[:, None], Z_REF, beta=0.1)


def test_saturated_margins_stay_finite():
    losses = kto_losses(torch.tensor([1e6, -1e6]), torch.tensor([True, True]), torch.tensor(0.0), beta=1.0)
    assert losses.tolist() == [0.0, 1.0]


@pytest.mark.parametrize("losses", [kto_losses, partial(kto_losses, function="log-sigmoid")])
def test_smoothing_mixes_in_the_other_sign_and_keeps_the_rows_own_weight(losses):
    weights = {"beta": 0.5, "desirable_weight": 1.5, "undesirable_weight": 0.75}
    plain = losses(LOG_RATIOS, LABELS, Z_REF, **weights)
    # The other label's loss, with its weight exchanged for the row's own.
    other = losses(LOG_RATIOS, ~LABELS, Z_REF, beta=0.5, desirable_weight=0.75, undesirable_weight=1.5)
    smoothed = losses(LOG_RATIOS, LABELS, Z_REF, **weights, label_smoothing=0.2)
    assert smoothed.tolist() == pytest.approx((0.8 * plain + 0.2 * other).tolist(), rel=1e-12)
    assert smoothed[0] == pytest.approx(float(0.8 * plain[0] + 0.2 * other[0]), rel=1e-12)
    assert abs(float(smoothed[0] - plain[0])) > 0.01


def test_bco_is_the_cross_entropy_of_a_classifier_around_the_shift():
    losses = kto_losses(
        LOG_RATIOS, LABELS, Z_REF, beta=0.5, desirable_weight=1.5, undesirable_weight=0.75, function="log-sigmoid"
    )
    probability = [sigmoid(0.5 * (r - 0.25)) for r in (1.0, -2.0, 0.5)]
    expected = [-1.5 * math.log(probability[0]), *(-0.75 * math.log(1 - p) for p in probability[1:])]
    assert losses.tolist() == pytest.approx(expected, rel=1e-12)
    assert KTOLoss(0.5, 1.5, 0.75, "bco")(LOG_RATIOS, LABELS, Z_REF).tolist() == losses.tolist()


def test_bco_stays_exact_far_from_the_shift():
    losses = kto_losses(
        torch.tensor([1e3, -1e3]).double(),
        torch.tensor([True, True]),
        torch.tensor(0.0),
        beta=1.0,
        function="log-sigmoid",
    )
    assert losses.tolist() == [0.0, 1e3]
    near = kto_losses(
        torch.tensor([25.0]).double(), torch.tensor([False]), torch.tensor(0.0), beta=1.0, function="log-sigmoid"
    )
    assert float(near[0]) == pytest.approx(25.0 + math.log1p(math.exp(-25.0)), rel=1e-15)


MASK = torch.tensor([[False, False, True, True, True], [False, True, False, True, False], [False] * 5])
TOKENS = torch.tensor([-1.0, -2.0, -0.5, -3.0, -0.25])
REF_TOKENS = torch.tensor([-4.0, -1.5, -0.75, -0.5, -0.5])


def test_log_ratios_a_token_are_divided_by_each_completions_own_tokens():
    log_ratios = length_normalized_log_ratios(torch.tensor([6.0, -3.0, 0.0]).double(), MASK)
    assert log_ratios.tolist() == [2.0, -1.5, 0.0]
    loss = KTOLoss(loss_type="kto_length_normalized")
    sums = torch.tensor([-3.5, -3.25, 0.0]).double(), torch.tensor([-6.25, -1.0, 0.0]).double()
    assert loss.log_ratios(*sums, MASK).tolist() == pytest.approx([2.75 / 3, -2.25 / 2, 0.0], rel=1e-12)


def test_humanline_clamps_every_token_before_it_sums_a_row():
    # Token log-ratios 3, -0.5, 0.25 | -2.5, 0.25: the first is cut to 1.5, the fourth raised to -1.
    tokens = TOKENS.clone().requires_grad_()
    log_ratios = humanline_log_ratios(tokens, REF_TOKENS, MASK, -1.0, 1.5)
    assert log_ratios.tolist() == [1.5 - 0.5 + 0.25, -1.0 + 0.25, 0.0]
    log_ratios.sum().backward()
    assert tokens.grad.tolist() == [0.0, 1.0, 1.0, 0.0, 1.0]
    loss = KTOLoss(loss_type="kto_humanline")
    assert loss.facts.by_token
    assert loss.log_ratios(TOKENS, REF_TOKENS, MASK).tolist() == log_ratios.tolist()
    assert loss.row_log_probs(TOKENS, MASK).tolist() == [-3.5, -3.25, 0.0]


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_humanline_hides_no_token_that_is_not_finite(broken):
    tokens = torch.tensor([broken, *TOKENS[1:].tolist()])
    assert humanline_log_ratios(tokens, REF_TOKENS, MASK, -1.0, 1.5).isfinite().tolist() == [False, True, True]


def test_the_sft_loss_is_the_desirable_rows_likelihood_a_token():
    log_probs = torch.tensor([-3.0, -100.0, -6.0, math.nan]).double()
    loss = sft_loss(log_probs, torch.tensor([True, False, True, False]), 12.0)
    assert float(loss) == 0.75
    assert float(sft_loss(log_probs[1:2], torch.tensor([False]), 0.0)) == 0.0


def test_a_rows_own_weight_multiplies_that_of_its_class():
    loss = KTOLoss(0.5, 2.0, 3.0)
    plain = loss(LOG_RATIOS, LABELS, Z_REF)
    assert loss(LOG_RATIOS, LABELS, Z_REF, torch.tensor([0.5, 0.0, 4.0])).tolist() == pytest.approx(
        [0.5 * float(plain[0]), 0.0, 4.0 * float(plain[2])], rel=1e-12
    )
