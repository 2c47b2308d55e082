"""Facts about each loss; the formulas are in openkto/models/loss.py."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class LossFacts:
    """The parts that an objective is made of: each is a function of beta * s_i * (r_i - reference point)."""

    reference_point: Literal["mismatched pairs", "earlier steps", "zero"]
    function: Literal["sigmoid", "log-sigmoid"] = "sigmoid"  # the loss is 1 - sigmoid or -log sigmoid
    log_ratio: Literal["sum", "mean", "clamped"] = "sum"  # of the completion's tokens

    @property
    def needs_z_ref(self) -> bool:
        """Whether mismatched pairs run through both models for the reference point."""
        return self.reference_point == "mismatched pairs"

    @property
    def needs_shift(self) -> bool:
        """Whether the reference point is the mean log-ratio of the rows of all steps before."""
        return self.reference_point == "earlier steps"

    @property
    def by_token(self) -> bool:
        """Whether the reference is asked for each token's log-probability; a cache has whole completions' only."""
        return self.log_ratio == "clamped"


LOSSES = {
    "kto": LossFacts("mismatched pairs"),
    "apo_zero_unpaired": LossFacts("zero"),
    "kto_length_normalized": LossFacts("mismatched pairs", log_ratio="mean"),
    "bco": LossFacts("earlier steps", "log-sigmoid"),
    "kto_humanline": LossFacts("mismatched pairs", log_ratio="clamped"),
}
