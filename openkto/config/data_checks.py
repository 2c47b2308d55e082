"""The rules between the settings of the rows."""

from __future__ import annotations

import datetime
import json
import math
from collections import Counter
from collections.abc import Sequence

from openkto.config import TEMPLATE_ARGUMENTS, DataConfig, split_eval_set
from openkto.config.engine_checks import Place
from openkto.errors import fail


def check_data(data: DataConfig, place: Place) -> None:
    names = Counter(split_eval_set(item)[0] for item in data.eval_dataset)
    twice = [name for name, count in names.items() if count > 1]
    if twice:
        fail(
            place("eval_dataset"),
            "each set needs its own name",
            f"{twice[0]!r} {names[twice[0]]} times",
            "Write NAME=PATH for each.",
        )
    if any(not entry for _, entry in map(split_eval_set, data.eval_dataset)):
        fail(place("eval_dataset"), "must be PATH or NAME=PATH", "a name without a path", "Give the path.")
    check_template(place("input_template"), data.input_template, data.apply_chat_template)
    template_kwargs(place("chat_template_kwargs"), data.chat_template_kwargs)
    if data.template_date is not None and not _is_day(data.template_date):
        fail(place("template_date"), "must be a day, YYYY-MM-DD", repr(data.template_date), "Correct it.")
    label_meanings(place("label_map"), data.label_map)
    if data.label_threshold:
        check_threshold(place("label_threshold"), data.label_threshold)
    if data.label_map and data.label_threshold:
        fail(place("label_threshold"), "cannot go with --label_map, which reads labels too", "both", "Leave one out.")
    known = {"--label_key": data.label_key, "--input_key": data.input_key, "--output_key": data.output_key}
    for flag, key in known.items():
        if data.weight_key is not None and data.weight_key == key:
            fail(
                place("weight_key"),
                f"must name another field than {flag}",
                f"{key!r} for both",
                "Name the field with the weights.",
            )


def _is_day(text: str) -> bool:
    try:
        return datetime.date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


def template_kwargs(place: str, text: str | None) -> dict[str, object]:
    """Return the arguments for the chat template that a JSON text holds; raises a ConfigError where it is none."""
    try:
        value = {} if text is None else json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        fail(place, "must be a JSON object", repr(text), "Correct it, or leave it out.")
    reserved = sorted(TEMPLATE_ARGUMENTS & value.keys())
    if reserved:
        fail(place, "must name arguments that only the chat template knows", repr(reserved[0]), "Leave that one out.")
    return value


def label_meanings(place: str, items: list[str]) -> dict[str, bool | None] | None:
    """Return what --label_map says of each value, None for one to leave out; raises ConfigError."""
    meanings = {"true": True, "false": False, "none": None}
    found: dict[str, bool | None] = {}
    for item in items:
        value, equals, meaning = item.rpartition("=")
        if not equals or meaning.strip().lower() not in meanings or value.strip() in found:
            fail(place, "must be VALUE=true, VALUE=false or VALUE=none, each value once", repr(item), "Correct it.")
        found[value.strip()] = meanings[meaning.strip().lower()]
    return found or None


def check_threshold(place: str, values: Sequence[object]) -> tuple[float, ...]:
    """Return the scores of --label_threshold, one or two that differ; raises ConfigError."""
    try:
        numbers = tuple(float(str(value)) for value in values)
    except ValueError:
        numbers = ()
    if len(numbers) not in (1, 2) or len(set(numbers)) < len(numbers) or not all(map(math.isfinite, numbers)):
        got = " ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in values) or "nothing"
        fail(place, "must be one number, or two that differ", got, "Give the scores.")
    return numbers


def check_template(place: str, template: str | None, apply_chat_template: bool | None) -> None:
    """Raise a ConfigError for a template without one place for the prompt, or together with a chat template."""
    if template is not None and template.count("{}") != 1:
        fail(
            place,
            "must hold {} once, where the prompt goes",
            f"{template!r} with {template.count('{}')}",
            "Correct it, or leave it out.",
        )
    if template is not None and apply_chat_template:
        fail(
            place, "cannot go with --apply_chat_template, which wraps the prompt too", "both", "Leave one of them out."
        )


def check_holdout(data: DataConfig, place: Place) -> None:
    if data.eval_fraction is None:
        return
    if data.eval_dataset:
        cure = "Leave one of them out; openkto evaluate takes further sets afterwards."
        fail(place("eval_fraction"), "makes the evaluation set itself", "--eval_dataset as well", cure)
    if data.eval_split != DataConfig().eval_split:
        cure = "Leave it out, or give --eval_dataset in place of --eval_fraction."
        fail(place("eval_split"), "is read of --eval_dataset", "--eval_fraction, which holds out training rows", cure)


def check_mixing(data: DataConfig, place: Place) -> None:
    if data.dataset_probs is None:
        return
    count, total = len(data.dataset_probs), sum(data.dataset_probs)
    if count != len(data.dataset):
        fail(
            place("dataset_probs"),
            f"must be as many as the datasets, {len(data.dataset)}",
            str(count),
            "Give one for each.",
        )
    if abs(total - 1) > 1e-6:
        fail(place("dataset_probs"), "must sum to 1", f"{total:.6g}", "Correct them.")
