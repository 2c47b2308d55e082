"""The balance of the two classes: the ratio that the paper recommends, and the weight that gives this ratio.

Source: Ethayarajh et al., arXiv:2402.01306v1, on imbalanced data: (lambda_D n_D) / (lambda_U n_U) in [1, 4/3].
Version 4 of the paper has 3/2 as the upper bound; the narrower one of version 1 is used here.
"""

from typing import Literal

SMALLEST_RATIO = 1.0
LARGEST_RATIO = 4 / 3
Weight = float | Literal["auto"]


def resolve_weights(
    desirable_weight: Weight, undesirable_weight: Weight, n_desirable: float, n_undesirable: float
) -> tuple[float, float]:
    """Return both weights as numbers: "auto" raises the smaller class until the ratio is 1, and is never below 1."""
    if desirable_weight == "auto":
        assert undesirable_weight != "auto", "one is set by the other: openkto/config/checks.py refuses auto for both"
        if n_desirable > 0:
            return max(1.0, undesirable_weight * n_undesirable / n_desirable), undesirable_weight
        return 1.0, undesirable_weight
    if undesirable_weight == "auto":
        if n_undesirable > 0:
            return desirable_weight, max(1.0, desirable_weight * n_desirable / n_undesirable)
        return desirable_weight, 1.0
    return desirable_weight, undesirable_weight


def describe_balance(
    desirable_weight: float,
    undesirable_weight: float,
    n_desirable: float,
    n_undesirable: float,
    left_out: tuple[int, int] = (0, 0),
) -> tuple[str, str | None]:
    """Return the line with counts and ratio, and a warning with a suggestion where the ratio is out of range.

    The counts of rows with weights of their own are the sums of these.

    `left_out` counts the desirable and undesirable rows that were too long, which may be all of a class.
    """
    counts = f"desirable {n_desirable}, undesirable {n_undesirable}"
    if n_desirable == 0 or n_undesirable == 0:
        missing, too_long = ("desirable", left_out[0]) if n_desirable == 0 else ("undesirable", left_out[1])
        if too_long:
            return counts, (
                f"all {too_long} {missing} rows are longer than --max_len and left out: KTO needs both classes."
                " Raise --max_len, or change --truncation."
            )
        return counts, f"the data has no {missing} rows: KTO needs both classes. Check the labels."
    desirable, undesirable = desirable_weight * n_desirable, undesirable_weight * n_undesirable
    if undesirable == 0:
        return counts, None
    ratio = desirable / undesirable
    weighted = f"({desirable_weight:g} * {n_desirable}) / ({undesirable_weight:g} * {n_undesirable})"
    line = f"{counts}, ratio {weighted} = {ratio:.4g}"
    # A weight resolved to ratio 1 may miss it by a rounding error.
    if SMALLEST_RATIO - 1e-9 <= ratio <= LARGEST_RATIO + 1e-9:
        return line, None
    if ratio < SMALLEST_RATIO:
        flag, lowest, highest = "desirable", undesirable / n_desirable, LARGEST_RATIO * undesirable / n_desirable
    else:
        flag, lowest, highest = "undesirable", desirable / n_undesirable / LARGEST_RATIO, desirable / n_undesirable
    return line, (
        f"the ratio of weights x counts, {ratio:.4g}, is outside [1, 4/3], which the KTO paper"
        f" (arXiv:2402.01306v1) recommends. Pass --{flag}_loss_weight between {lowest:.4g} and {highest:.4g}, or auto "
        "for the smaller class."
    )
