"""Turns a setting's text, from a flag or a YAML file, into its type and checks its own range."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from dataclasses import dataclass
from typing import Any

from openkto.config import METRIC_SCHEDULERS, Option, default_text
from openkto.config.option import LARGE
from openkto.errors import ConfigError
from openkto.masking import HTTP, is_masked, masked

DAYS_TOO_MANY = 10_000  # a typing mistake
Raw = str | list[str] | None  # a value as it was typed; None is YAML's null

BOOLEANS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


@dataclass(frozen=True)
class Given:
    """A value as it was typed, and where: "--beta" or "run.yaml: beta"."""

    place: str
    raw: Raw


def convert(item: dataclasses.Field[Any], given: Given) -> Any:
    """Return the typed value of a setting, within its own range."""
    _refuse_special(item.name, given)
    raw, known = given.raw, item.metadata["option"]
    try:
        if raw is None:
            if "None" in str(item.type):
                return None
            raise ValueError
        if not is_list(item):
            return convert_one(raw, kind_of(item), known)
        kind = kind_of(item).partition("[")[2].rstrip("]").partition(",")[0]
        values = [convert_one(text, kind, known) for text in _split(raw)]
        if not values or (kind_of(item).startswith("tuple") and len(values) != 2):
            raise ValueError
        return tuple(values) if kind_of(item).startswith("tuple") else values
    except ValueError:
        got = "nothing" if raw in (None, "", []) else _short(raw)
        cure = "Correct it." if default_text(item).startswith("required") else "Correct it, or leave it out."
        allowed = f"below {LARGE}" if _is_too_large(raw, known) else rule(item)
        raise ConfigError(f"{given.place}: must be {allowed}; got {got}. {cure}") from None


def convert_one(raw: Raw, kind: str, known: Option) -> Any:
    """Turn one text into its type; a ValueError without a message means that it is not one."""
    if not isinstance(raw, str):
        raise ValueError
    text = raw
    value: Any
    if kind == "bool":
        if text.lower() not in BOOLEANS:
            raise ValueError
        return BOOLEANS[text.lower()]
    if kind == "str":
        if not text or (known.choices and text not in known.choices):
            raise ValueError
        if known.is_duration:
            seconds_of(text)
        text.encode()  # a UnicodeEncodeError is a ValueError: bytes that were no UTF-8
        return os.path.expanduser(text) if known.is_path else text
    if kind in ("float | str", "int | str") and text == "auto":
        return text
    if kind == "bool | str":
        return BOOLEANS[text.lower()] if text.lower() in BOOLEANS else convert_one(raw, "str", known)
    value = float(text)
    is_outside = (
        not math.isfinite(value)
        or (known.at_least is not None and value < known.at_least)
        or (known.above is not None and value <= known.above)
        or (known.below is not None and value >= known.below)
        or (known.at_most is not None and value > known.at_most)
    )
    is_whole = kind.startswith("int")
    if is_outside or (is_whole and not value.is_integer()):
        raise ValueError
    return int(value) if is_whole else value


def _split(raw: str | list[str]) -> list[str]:
    """Split at commas too, as OpenRLHF does, but not inside the name of a file that exists, a mapping, or a query."""
    items = [raw] if isinstance(raw, str) else raw
    return [part.strip() for item in items for part in _parts(item)]


def _parts(item: str) -> list[str]:
    if item.startswith("{") or os.path.exists(item):
        return [item]
    has_query = any(protocol in item for protocol in HTTP) and "?" in item
    return re.split(r",(?=[\w.-]*=?\w+://)", item) if has_query else item.split(",")


def rule(item: dataclasses.Field[Any]) -> str:
    """Say in words what a setting may be: "a whole number, 1 or more"."""
    known: Option = item.metadata["option"]
    if known.choices:
        return f"one of {', '.join(known.choices[:-1])} or {known.choices[-1]}"
    if known.is_duration:
        return "days:hours:minutes:seconds, such as 0:03:55:00"
    words = {
        "int": "a whole number",
        "float": "a number",
        "float | str": "auto or a number",
        "int | str": "auto or a whole number",
        "bool": "true or false",
        "bool | str": "true, false or a path",
        "str": "a path or name" if known.is_path else "text",
        "list[str]": "one or more paths or names",
        "list[float]": "numbers",
        "tuple[float, float]": "two numbers",
    }
    kind, bounds = words[kind_of(item)], in_bounds(item)
    if not bounds:
        return kind
    if is_list(item):
        return f"{kind}, each {bounds}"
    return f"{kind} {bounds}" if bounds.startswith("above") else f"{kind}, {bounds}"


def in_bounds(item: dataclasses.Field[Any]) -> str:
    """Say in words between which bounds a number may be: "1 or more"; "" where it has none.

    A bound that only a typing mistake exceeds is named only in that error.
    """
    known: Option = item.metadata["option"]
    below = None if known.below == LARGE else known.below
    if kind_of(item).startswith("int") and known.at_least is not None and below is not None:
        return f"{known.at_least:g} to {below - 1:.10g}"
    if known.at_least is not None and below is None and known.at_most is None:
        return f"{known.at_least:g} or more"
    bounds = []
    if known.above is not None:
        bounds.append(f"above {known.above:g}")
    if known.at_least is not None:
        bounds.append(f"at least {known.at_least:g}")
    if below is not None:
        bounds.append(f"below {below:g}")
    if known.at_most is not None:
        bounds.append(f"at most {known.at_most:g}")
    return " and ".join(bounds)


def _is_too_large(raw: Raw, known: Option) -> bool:
    try:
        return known.below == LARGE and isinstance(raw, str) and float(raw) >= LARGE
    except ValueError:
        return False


def kind_of(item: dataclasses.Field[Any]) -> str:
    """Return a setting's type as it is written in its class, without `| None`."""
    return str(item.type).removesuffix(" | None")


def is_list(item: dataclasses.Field[Any]) -> bool:
    return kind_of(item).startswith(("list", "tuple"))


def _short(raw: Raw) -> str:
    text = masked(repr(" ".join(raw) if isinstance(raw, list) else raw))
    return text if len(text) <= 80 else f"{text[:76]}...'"


def _refuse_special(name: str, given: Given) -> None:
    """Refuse what deserves its own sentence."""
    text = given.raw.lower() if isinstance(given.raw, str) else ""
    texts = given.raw if isinstance(given.raw, list) else [given.raw or ""]
    lacking = next((part for part in texts if is_masked(part)), None)
    if lacking is not None:
        raise ConfigError(
            f"{given.place}: must be a whole address; got {_short(lacking)}, whose password or key was left out "
            f"when it was written down. Give --{name} again, with the whole address."
        )
    if name == "use_wandb" and text not in BOOLEANS:
        raise ConfigError(
            f"{given.place}: must be on or off, since a key does not belong on a command line or in a file; got "
            "another value, not repeated here. Set WANDB_API_KEY or run `wandb login`, and leave the value out."
        )
    if name == "lr_scheduler" and text in METRIC_SCHEDULERS:
        raise ConfigError(
            f"{given.place}: must be a schedule that is a function of the step; got {text!r}, which follows a metric. "
            "Take cosine_with_min_lr."
        )
    if name == "use_tensorboard" and text in BOOLEANS:
        raise ConfigError(
            f"{given.place}: must be a folder, or none for no TensorBoard; got {text!r}. Leave it out for the default."
        )


def seconds_of(text: str) -> float:
    """Return the seconds in days:hours:minutes:seconds, NeMo's form: "0:03:55:00" is 14,100.

    Raises:
        ValueError: it is not of this form, or is nothing.
    """
    fields = text.split(":")
    if len(fields) != 4 or not all(field.isascii() and field.isdigit() for field in fields):
        raise ValueError(text)
    days, hours, minutes, seconds = (int(field) for field in fields)
    total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if days >= DAYS_TOO_MANY or hours >= 24 or minutes >= 60 or seconds >= 60 or total == 0:
        raise ValueError(text)
    return float(total)
