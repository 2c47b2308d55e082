"""Rotary embeddings whose frequencies depend on the longest row of a forward pass.

Under `longrope` (Phi-3 and later, MiniCPM) there are two sets of frequencies, one for rows up to the length that the
model was first trained at and one for longer rows. Under `dynamic` (NTK) each length beyond the model's positions has a
set of its own, which the model then keeps for the forwards that follow.
"""

from typing import Any, NamedTuple

from openkto.errors import ConfigError

POSITIONS = ("rope_parameters", "rope_scaling")  # today's name in configurations, and that of models with own code


class RowLengths(NamedTuple):
    """What a model asks of the rows that run in one forward."""

    apart_at: int | None = None  # tokens: rows up to this length and longer ones go into different forwards
    at_most: int | None = None  # tokens: no row may be longer


def row_lengths(config: Any) -> RowLengths:
    """Return what the positions of a model with this configuration ask of its rows."""
    text = config.get_text_config()
    known = text.to_dict()
    found: dict[str, Any] = next((known[name] for name in POSITIONS if known.get(name)), {})
    # Some models have other positions in layers of each type.
    kinds = [kind for kind in found.values() if isinstance(kind, dict)] or [found]
    apart_at, at_most = None, None
    for kind in kinds:
        name = str(kind.get("rope_type") or kind.get("type") or "")
        first = kind.get("original_max_position_embeddings") or known.get("original_max_position_embeddings")
        if name in ("longrope", "su"):
            apart_at = first or text.max_position_embeddings
        elif "dynamic" in name:
            at_most = text.max_position_embeddings
    return RowLengths(apart_at, at_most)


def check_row_lengths(place: str, config: Any, longest: int) -> None:
    """Raise ConfigError where the model's positions cannot serve rows of this length.

    Args:
        place: names the model.
        longest: tokens of the longest row.
    """
    at_most = row_lengths(config).at_most
    if at_most is not None and longest > at_most:
        raise ConfigError(
            f"--max_len: {place} has dynamic rotary positions, which beyond {at_most} tokens depend on the other rows "
            f"of a forward; got sequences of up to {longest} tokens. Pass --max_len {at_most}."
        )
