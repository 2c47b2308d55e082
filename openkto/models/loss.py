"""The objectives for unpaired feedback as pure functions of log-probabilities.

Every one is a function of s_i * (r_i - reference point): they differ in how a row's log-ratio r_i is made of its
tokens', in the reference point, and in the function. docs/losses.md says when to use which.

Shapes:  N = rows in the step, on this rank or on all; B = rows in a micro-batch, T = its longest row, K = its scored
         tokens, row by row.
Units:   log-probabilities in nats, summed over a completion's tokens.
Source:  Ethayarajh et al., arXiv:2402.01306v4, section 4 ("Kahneman-Tversky Optimization"); D'Oosterlinck et al.,
         arXiv:2408.06266v5, section 4 (APO-zero), in its form for rows without partners; Jung et al.,
         arXiv:2404.04656v1 (BCO), with the running mean over rows of TRL's trl/trainer/bco_trainer.py; Liu et al.,
         arXiv:2509.24207v1 (humanline), with the bounds of HALOs' config/config.yaml; NeMo's
         preference_average_log_probs.
"""

from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from openkto.config import LOSSES, LossConfig, LossFacts
from openkto.models.log_probs import row_sums

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

    Source: arXiv:2509.24207v1; HALOs' `log_epsilon_P` and `log_epsilon_R`.
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
    point: Tensor,
    *,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    label_smoothing: float = 0.0,
    function: Literal["sigmoid", "log-sigmoid"] = "sigmoid",
) -> Tensor:
    """Return each row's loss, [N].

    With `sigmoid` it is lambda_y - v(x, y), between 0 and lambda_y: the paper's two cases of v differ only in a sign
    and a weight, so one expression serves both and a batch may hold a single class. With a reference point of 0 it is
    APO-zero for rows without partners. With `log-sigmoid` it is the cross-entropy of a binary classifier (BCO).

    Args:
        log_ratio_N: [N], nats: log pi(y|x) - log pi_ref(y|x).
        is_desirable_N: [N], bool.
        point: the reference point, a scalar in nats without gradient: z_ref, 0, or for BCO the mean log-ratio of the
            rows of all steps before.
        beta: how strongly the policy is held to the reference; larger is closer.
        desirable_weight: lambda_D.
        undesirable_weight: lambda_U.
        label_smoothing: the probability with which a label is taken to be wrong; the row keeps its own weight.
        function: the loss is 1 - sigmoid(m) or -log sigmoid(m) of m = beta s_i (r_i - reference point).

    Raises:
        ValueError: the shapes do not fit.
    """
    if log_ratio_N.dim() != 1 or log_ratio_N.shape != is_desirable_N.shape or point.dim() != 0:
        shapes = f"{tuple(log_ratio_N.shape)}, {tuple(is_desirable_N.shape)} and {tuple(point.shape)}"
        raise ValueError(f"kto_losses: log-ratios and labels must be [N], the reference point a scalar; got {shapes}.")
    margin_N = beta * margins(log_ratio_N, is_desirable_N, point)

    def loss_of(margin_N: Tensor) -> Tensor:
        return torch.sigmoid(-margin_N) if function == "sigmoid" else -F.logsigmoid(margin_N)

    loss_N = loss_of(margin_N)
    if label_smoothing > 0:
        loss_N = (1 - label_smoothing) * loss_N + label_smoothing * loss_of(-margin_N)
    desirable_N = is_desirable_N.to(margin_N.dtype)
    return (desirable_weight * desirable_N + undesirable_weight * (1 - desirable_N)) * loss_N


def margins(log_ratio_N: Tensor, is_desirable_N: Tensor, z_ref: Tensor) -> Tensor:
    """Return s_i * (r_i - z_ref), [N], nats: positive where the policy is on the right side of the reference point."""
    sign_N = torch.where(is_desirable_N, 1.0, -1.0)
    return sign_N * (log_ratio_N - z_ref)


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
    loss_type: str = "kto"
    label_smoothing: float = 0.0
    sft_loss_coef: float = 0.0
    humanline_low: float = -1.0
    humanline_high: float = 1.5
    aux_loss_coef: float = 0.0

    @classmethod
    def of(cls, settings: LossConfig) -> "KTOLoss":
        """Return the objective that the settings describe; weights that are `auto` must be numbers by now."""
        same = {field.name for field in fields(cls)} & {field.name for field in fields(settings)}
        return cls(
            desirable_weight=float(settings.desirable_loss_weight),
            undesirable_weight=float(settings.undesirable_loss_weight),
            **{name: getattr(settings, name) for name in same},
        )

    def settings(self) -> dict[str, Any]:
        """Return the constants by setting names: what `of` reads."""
        terms = asdict(self)
        return {f"{name}_loss_weight": terms.pop(f"{name}_weight") for name in ("desirable", "undesirable")} | terms

    @property
    def facts(self) -> LossFacts:
        """What is known of the chosen objective."""
        return LOSSES[self.loss_type]

    def log_ratios(self, log_prob: Tensor, ref_log_prob: Tensor, loss_mask_BT: Tensor) -> Tensor:
        """Return each row's log-ratio as this objective uses it, [B] float64, for matched and mismatched pairs alike.

        Args:
            log_prob, ref_log_prob: of policy and reference, nats: [K] with `facts.by_token`, else [B].
            loss_mask_BT: [B, T], True on scored tokens.
        """
        if self.facts.log_ratio == "clamped":
            bounds = self.humanline_low, self.humanline_high
            return humanline_log_ratios(log_prob, ref_log_prob, loss_mask_BT, *bounds)
        log_ratio_B = log_prob - ref_log_prob
        if self.facts.log_ratio == "mean":
            return length_normalized_log_ratios(log_ratio_B, loss_mask_BT)
        return log_ratio_B

    def row_log_probs(self, log_prob: Tensor, loss_mask_BT: Tensor) -> Tensor:
        """Return log pi(y|x) of each row, [B] float64, from what `log_ratios` takes."""
        return row_sums(log_prob, loss_mask_BT) if self.facts.by_token else log_prob

    def __call__(
        self, log_ratio_N: Tensor, is_desirable_N: Tensor, point: Tensor, row_weight_N: Tensor | None = None
    ) -> Tensor:
        """Return the rows' losses, [N]; a row's own weight multiplies that of its class."""
        losses_N = kto_losses(
            log_ratio_N,
            is_desirable_N,
            point,
            beta=self.beta,
            desirable_weight=self.desirable_weight,
            undesirable_weight=self.undesirable_weight,
            label_smoothing=self.label_smoothing,
            function=self.facts.function,
        )
        return losses_N if row_weight_N is None else row_weight_N * losses_N
