"""The objectives for unpaired feedback as pure functions of log-probabilities.

Every one is a function of s_i * (r_i - reference point): they differ in how a row's log-ratio r_i is made of its
tokens', in the reference point, and in the function. docs/losses.md says when to use which.

Shapes:  N = rows in the step, on this rank or on all; B = rows in a micro-batch, T = its longest row, K = its scored
         tokens, row by row.
Units:   log-probabilities in nats, summed over a completion's tokens.
Source:  Ethayarajh et al., arXiv:2402.01306, section 4 ("Kahneman-Tversky Optimization"); D'Oosterlinck et al.,
         arXiv:2408.06266, section 4 (APO-zero), in its form for rows without partners; Jung et al., arXiv:2404.04656
         (BCO), with the running mean over rows of TRL's trl/trainer/bco_trainer.py; Liu et al., arXiv:2509.24207
         (humanline), with the bounds of HALOs' config/config.yaml; NeMo's preference_average_log_probs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from openkto.config import LOSSES_WITH_Z_REF, TOKEN_LOSSES
from openkto.models.log_probs import row_sums

LossType = Literal["kto", "apo_zero_unpaired", "kto_length_normalized", "bco", "kto_humanline"]


# ---- what a row's log-ratio is --------------------------------------------------------------------------------------


def length_normalized_log_ratios(log_ratio_B: Tensor, loss_mask_BT: Tensor) -> Tensor:
    """Return log-ratios in nats a token, [B]: each divided by its completion's scored tokens.

    Source: `preference_average_log_probs` of NeMo-Aligner and NeMo RL.
    """
    return log_ratio_B / loss_mask_BT.sum(1).clamp(min=1)


def humanline_log_ratios(
    log_prob_K: Tensor, ref_log_prob_K: Tensor, loss_mask_BT: Tensor, low: float, high: float
) -> Tensor:
    """Return log-ratios whose every token is clamped to [low, high] before they are summed, [B] float64.

    A token beyond a bound has no gradient. One that is not finite stays so, for the check that stops the run.

    Source: arXiv:2509.24207; HALOs' `log_epsilon_P` and `log_epsilon_R`.
    """
    log_ratio_K = log_prob_K - ref_log_prob_K
    clamped_K = torch.where(log_ratio_K.isfinite(), log_ratio_K.clamp(low, high), log_ratio_K)
    return row_sums(clamped_K, loss_mask_BT)


# ---- the reference point and the losses -----------------------------------------------------------------------------


def reference_point(mismatched_sum: Tensor, num_rows: Tensor) -> Tensor:
    """Return z_ref, a scalar in nats: the mean log-ratio of the mismatched pairs, clamped last.

    Args:
        mismatched_sum: scalar, nats: the sum of k_i over the whole global batch.
        num_rows: scalar: its number of rows.
    """
    return (mismatched_sum / num_rows).clamp(min=0)


def kto_losses(
    log_ratio_N: Tensor,
    is_desirable_N: Tensor,
    z_ref: Tensor,
    *,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return each row's loss, lambda_y - v(x, y).

    The paper's two cases of v differ in a sign and a weight alone, so one expression serves both and a batch may
    hold a single class. With z_ref = 0 it is APO-zero for rows without partners.

    Args:
        log_ratio_N: [N], nats: log pi(y|x) - log pi_ref(y|x).
        is_desirable_N: [N], bool.
        z_ref: scalar, nats, without gradient.
        beta: how strongly the policy is held to the reference; larger is closer.
        desirable_weight: lambda_D.
        undesirable_weight: lambda_U.
        label_smoothing: the probability with which a label is taken to be wrong; the row keeps its own weight.

    Returns:
        [N], each between 0 and lambda_y.
    """
    margin_N = beta * _checked_margins("kto_losses", log_ratio_N, is_desirable_N, z_ref)
    weight_N = _class_weights(is_desirable_N, margin_N.dtype, desirable_weight, undesirable_weight)
    return weight_N * _smoothed(lambda m: torch.sigmoid(-m), margin_N, label_smoothing)


def bco_losses(
    log_ratio_N: Tensor,
    is_desirable_N: Tensor,
    shift: Tensor,
    *,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return each row's cross-entropy as a binary classifier sees it: -log sigmoid(beta s_i (r_i - shift)), [N].

    Args:
        shift: scalar, nats, without gradient: the mean log-ratio of the rows of all steps before.
        log_ratio_N, is_desirable_N, beta, desirable_weight, undesirable_weight, label_smoothing: as in `kto_losses`.
    """
    margin_N = beta * _checked_margins("bco_losses", log_ratio_N, is_desirable_N, shift)
    weight_N = _class_weights(is_desirable_N, margin_N.dtype, desirable_weight, undesirable_weight)
    return weight_N * _smoothed(lambda m: -F.logsigmoid(m), margin_N, label_smoothing)


def margins(log_ratio_N: Tensor, is_desirable_N: Tensor, z_ref: Tensor) -> Tensor:
    """Return s_i * (r_i - z_ref), [N], nats: positive where the policy is on the right side of the reference point."""
    sign_N = torch.where(is_desirable_N, 1.0, -1.0)
    return sign_N * (log_ratio_N - z_ref)


def _checked_margins(name: str, log_ratio_N: Tensor, is_desirable_N: Tensor, z_ref: Tensor) -> Tensor:
    if log_ratio_N.dim() != 1 or log_ratio_N.shape != is_desirable_N.shape or z_ref.dim() != 0:
        shapes = f"{tuple(log_ratio_N.shape)}, {tuple(is_desirable_N.shape)} and {tuple(z_ref.shape)}"
        raise ValueError(f"{name}: log-ratios and labels must be [N] and z_ref a scalar; got {shapes}.")
    return margins(log_ratio_N, is_desirable_N, z_ref)


def _class_weights(is_desirable_N: Tensor, dtype: torch.dtype, desirable: float, undesirable: float) -> Tensor:
    desirable_N = is_desirable_N.to(dtype)
    return desirable * desirable_N + undesirable * (1 - desirable_N)


def _smoothed(loss_of: Callable[[Tensor], Tensor], margin_N: Tensor, label_smoothing: float) -> Tensor:
    """Return (1 - e) loss(s) + e loss(-s), [N]."""
    if label_smoothing == 0:
        return loss_of(margin_N)
    return (1 - label_smoothing) * loss_of(margin_N) + label_smoothing * loss_of(-margin_N)


def sft_loss(log_prob_N: Tensor, is_desirable_N: Tensor, desirable_tokens: float | Tensor) -> Tensor:
    """Return the negative log-likelihood of the desirable rows in nats a token, a scalar.

    Args:
        log_prob_N: [N], nats: log pi(y|x).
        is_desirable_N: [N], bool.
        desirable_tokens: the scored tokens of all desirable rows of the global batch; with none the loss is 0.
    """
    return -torch.where(is_desirable_N, log_prob_N, 0.0).sum() / torch.as_tensor(desirable_tokens).clamp(min=1)


# ---- the choice -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KTOLoss:
    """The chosen objective with its constants; call it with log-ratios, labels and the reference point.

    `kto` needs z_ref from mismatched pairs, and so do its variants by length and by clamped tokens. `apo_zero_unpaired`
    has the reference point 0 and `bco` the mean over all steps before, so these run no mismatched forwards.
    """

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    loss_type: LossType = "kto"
    label_smoothing: float = 0.0
    sft_loss_coef: float = 0.0
    humanline_low: float = -1.0
    humanline_high: float = 1.5

    @property
    def needs_z_ref(self) -> bool:
        """Whether the objective is relative to the mismatched pairs' mean log-ratio."""
        return self.loss_type in LOSSES_WITH_Z_REF

    @property
    def needs_shift(self) -> bool:
        """Whether the objective is relative to the mean log-ratio of all steps before."""
        return self.loss_type == "bco"

    @property
    def by_token(self) -> bool:
        """Whether `log_ratios` takes the log-probabilities of tokens, [K], and not their sums over rows, [B]."""
        return self.loss_type in TOKEN_LOSSES

    def log_ratios(self, log_prob: Tensor, ref_log_prob: Tensor, loss_mask_BT: Tensor) -> Tensor:
        """Return each row's log-ratio as this objective uses it, [B] float64, for matched and mismatched pairs alike.

        Args:
            log_prob, ref_log_prob: of policy and reference, nats: [K] with `by_token`, else [B].
            loss_mask_BT: [B, T], True on scored tokens.
        """
        if self.by_token:
            bounds = self.humanline_low, self.humanline_high
            return humanline_log_ratios(log_prob, ref_log_prob, loss_mask_BT, *bounds)
        log_ratio_B = log_prob - ref_log_prob
        if self.loss_type == "kto_length_normalized":
            return length_normalized_log_ratios(log_ratio_B, loss_mask_BT)
        return log_ratio_B

    def row_log_probs(self, log_prob: Tensor, loss_mask_BT: Tensor) -> Tensor:
        """Return log pi(y|x) of each row, [B] float64, from what `log_ratios` takes."""
        return row_sums(log_prob, loss_mask_BT) if self.by_token else log_prob

    def __call__(
        self, log_ratio_N: Tensor, is_desirable_N: Tensor, z_ref: Tensor, row_weight_N: Tensor | None = None
    ) -> Tensor:
        """Return the rows' losses, [N]; a row's own weight multiplies that of its class."""
        losses = bco_losses if self.loss_type == "bco" else kto_losses
        losses_N = losses(
            log_ratio_N,
            is_desirable_N,
            z_ref,
            beta=self.beta,
            desirable_weight=self.desirable_weight,
            undesirable_weight=self.undesirable_weight,
            label_smoothing=self.label_smoothing,
        )
        return losses_N if row_weight_N is None else row_weight_N * losses_N
