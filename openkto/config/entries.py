"""The entries of --eval_dataset: each a path, with a name or without, or the JSON text of a mapping of settings."""

from __future__ import annotations

import json
import os
from typing import Any

from openkto.config.data import DataConfig
from openkto.masking import name_of_address


def eval_sets(config: DataConfig) -> dict[str, str]:
    """Return the evaluation sets by name, each as an entry that --dataset could have, in the order given."""
    return dict(split_eval_set(item) for item in config.eval_dataset)


def has_evaluation(config: DataConfig) -> bool:
    """Return whether a training run has rows to evaluate on."""
    return bool(config.eval_dataset) or config.eval_fraction is not None


def split_eval_set(item: str) -> tuple[str, str]:
    """Split `NAME=PATH`, or take the name out of a mapping; a set without one is called after its file or folder."""
    if item.startswith("{"):
        members = _members(item)
        name = members.pop("name", None) or _stem(path_of_entry(item) or item)
        return str(name), json.dumps(members, ensure_ascii=False) if members else item
    name, equals, path = item.partition("=")
    if equals and name and all(letter.isalnum() or letter in "_-." for letter in name):
        return name, os.path.expanduser(path)
    return _stem(item), os.path.expanduser(item)


def path_of_entry(item: str) -> str:
    """Return the path in an entry of --dataset, which may be the JSON text of a mapping."""
    return str(_members(item).get("path", "")) if item.startswith("{") else item


def _members(item: str) -> dict[str, Any]:
    """Return the members of a mapping; none where the text is none, which openkto/data/entries.py refuses."""
    try:
        members = json.loads(item)
    except (ValueError, RecursionError):
        members = None
    return members if isinstance(members, dict) else {}


def _stem(path: str) -> str:
    """Return the name of a file without its extensions, or of a folder."""
    if "://" in path:
        path = name_of_address(path).partition("?")[0]
    return path.rstrip("/").rpartition("/")[2].partition(".")[0] or path
