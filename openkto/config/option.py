"""The help text, unit, range and other facts of a setting."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

LARGE = 2**31  # a larger count is a typing mistake


@dataclass(frozen=True)
class Option:
    """What is known of a setting besides its type and default."""

    help: str
    unit: str = ""
    choices: tuple[str, ...] = ()
    at_least: float | None = None
    above: float | None = None
    below: float | None = None
    at_most: float | None = None
    is_path: bool = False
    is_duration: bool = False
    default_text: str = ""  # says what an absent value means
    openrlhf: str = ""  # OpenRLHF's default, where ours differs
    train_only: bool = False  # `evaluate` has no use for it; in a YAML file it is allowed there, for a run.yaml
    same_run: bool = False  # a run that is resumed must have the same value, or it would be another run
    of_one_start: bool = False  # belongs to one start of a run, or to a process, and not into run.yaml
    may_differ: bool = False  # between ranks: where a node finds something, or what only the first rank uses


def option(default: Any, help: str, unit: str = "", **known: Any) -> Any:
    """Return a dataclass field with its `Option`; a list stands for a fresh copy of itself."""
    metadata = {"option": Option(help, unit, **known)}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)
