"""A JSON schema of the YAML files, made from the settings: editors complete and check a file by it.

It holds types, choices and ranges. It does not hold the rules between settings; see `checks.py`.
"""

import dataclasses
from typing import Any

from openkto.config import default_text, settings
from openkto.config.values import is_list, kind_of

Schema = dict[str, Any]

DRAFT = "https://json-schema.org/draft/2020-12/schema"
BOOLEAN: Schema = {"enum": [True, False, "true", "false", "yes", "no", "on", "off"]}
DURATION: Schema = {"type": "string", "pattern": r"^\d+:\d+:\d+:\d+$"}
# A name or a path may look like a number.
TEXT: Schema = {"type": ["string", "number"]}
ENTRIES = ("dataset", "eval_dataset")  # each of their items may be a mapping with settings of its own


def schema() -> Schema:
    """Return the schema of a file that is given with --config."""
    return {
        "$schema": DRAFT,
        "title": "OpenKTO: a run",
        "description": "The settings of a run. Each is also a flag of openkto train, which overrides the file.",
        "type": "object",
        "properties": {name: _property(item) for name, item in settings().items()},
        "additionalProperties": False,
    }


def _property(item: dataclasses.Field[Any]) -> Schema:
    known = item.metadata["option"]
    unit = f" [{known.unit}]" if known.unit else ""
    values = [_value(item)]
    if item.name == "chat_template_kwargs":
        values.append({"type": "object"})
    if "None" in str(item.type):
        values.append({"type": "null"})
    described = {"description": f"{known.help}{unit} (default: {default_text(item)})"}
    return described | (values[0] if len(values) == 1 else {"anyOf": values})


def _value(item: dataclasses.Field[Any]) -> Schema:
    known, kind = item.metadata["option"], kind_of(item)
    if is_list(item):
        one = _scalar(known, kind.partition("[")[2].rstrip("]").partition(",")[0])
        if item.name in ENTRIES:
            one = {"anyOf": [one, {"type": "object"}]}
        size = {"minItems": 2, "maxItems": 2} if kind.startswith("tuple") else {"minItems": 1}
        # Several may be written in one text with commas between them.
        return {"anyOf": [{"type": "array", "items": one, **size}, one, TEXT]}
    return _scalar(known, kind)


def _scalar(known: Any, kind: str) -> Schema:
    if kind == "bool":
        return BOOLEAN
    if kind == "bool | str":
        return {"type": ["boolean", "string"]}
    if kind == "str":
        if known.choices:
            # Unquoted, YAML reads these two as booleans.
            unquoted = [value for value in (True, False) if str(value).lower() in known.choices]
            return {"enum": [*known.choices, *unquoted]}
        return DURATION if known.is_duration else TEXT
    bounds = {
        "minimum": known.at_least,
        "exclusiveMinimum": known.above,
        "maximum": known.at_most,
        "exclusiveMaximum": known.below,
    }
    number = {"type": "integer" if kind.startswith("int") else "number"}
    number |= {name: bound for name, bound in bounds.items() if bound is not None}
    return {"anyOf": [number, {"const": "auto"}]} if kind.endswith("| str") else number
