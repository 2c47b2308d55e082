"""Read a row's own weight: a number, 0 or more, from the field that --weight_key names."""

import math

import numpy as np

from openkto.data.problems import BadRow, shorten


def read_weight(place: str, key: str, value: object) -> float:
    """Return the weight; a CSV cell or a string holds it as text. Raises BadRow."""
    if isinstance(value, np.generic):
        value = value.item()
    weight = math.nan
    if isinstance(value, (int, float, str)) and not isinstance(value, bool):
        try:
            weight = float(value)
        except (ValueError, OverflowError):
            weight = math.nan
    if not (math.isfinite(weight) and weight >= 0):
        raise BadRow(place, "weight", f"{key}, the row's weight, must be a number, 0 or more", shorten(value))
    return weight
