"""The KTO objective as pure functions of log-probabilities.

Shapes:  N = rows in the step, on this rank or on all.
Units:   log-probabilities in nats, summed over a completion's tokens.
Source:  Ethayarajh et al., arXiv:2402.01306, section 4 ("Kahneman-Tversky Optimization"); D'Oosterlinck et al.,
         arXiv:2408.06266, section 4 (APO-zero), in its form for rows without partners.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

LossType = Literal["kto", "apo_zero_unpaired"]


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

    Returns:
        [N], each between 0 and lambda_y.
    """
    if log_ratio_N.dim() != 1 or log_ratio_N.shape != is_desirable_N.shape or z_ref.dim() != 0:
        shapes = f"{tuple(log_ratio_N.shape)}, {tuple(is_desirable_N.shape)} and {tuple(z_ref.shape)}"
        raise ValueError(f"kto_losses: log-ratios and labels must be [N] and z_ref a scalar; got {shapes}.")
    desirable_N = is_desirable_N.to(log_ratio_N.dtype)
    weight_N = desirable_weight * desirable_N + undesirable_weight * (1 - desirable_N)
    return weight_N * torch.sigmoid(-beta * margins(log_ratio_N, is_desirable_N, z_ref))


def margins(log_ratio_N: Tensor, is_desirable_N: Tensor, z_ref: Tensor) -> Tensor:
    """Return s_i * (r_i - z_ref), [N], nats: positive where the policy is on the right side of the reference point."""
    sign_N = torch.where(is_desirable_N, 1.0, -1.0)
    return sign_N * (log_ratio_N - z_ref)


@dataclass(frozen=True)
class KTOLoss:
    """The chosen objective with its constants; call it with log-ratios, labels and z_ref to get the rows' losses.

    `kto` needs z_ref from mismatched pairs. `apo_zero_unpaired` has the reference point 0, so it runs no mismatched
    forwards.
    """

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    loss_type: LossType = "kto"

    @property
    def needs_z_ref(self) -> bool:
        """Whether the objective is relative to the mismatched pairs' mean log-ratio."""
        return self.loss_type == "kto"

    def __call__(self, log_ratio_N: Tensor, is_desirable_N: Tensor, z_ref: Tensor) -> Tensor:
        return kto_losses(
            log_ratio_N,
            is_desirable_N,
            z_ref,
            beta=self.beta,
            desirable_weight=self.desirable_weight,
            undesirable_weight=self.undesirable_weight,
        )
