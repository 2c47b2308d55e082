"""A model's name with a branch, tag or commit, as the Hub's own addresses write it: owner/name@revision."""

import os
import re

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[\w.-]+)?@[^@\s]+")


def split_revision(name: str) -> tuple[str, str | None]:
    """Return what the Hub calls a model, and the revision that is asked for; a folder has none."""
    if os.path.isdir(name) or not HUB_NAME.fullmatch(name):
        return name, None
    repository, _, revision = name.partition("@")
    return repository, revision


def with_revision(name: str, revision: str | None) -> str:
    """Return a name that `split_revision` takes apart again."""
    return name if revision is None else f"{name}@{revision}"
