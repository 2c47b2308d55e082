"""The licence of a base model, as its own card says, or its config.json."""

import json
import logging
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download, metadata_load

from openkto.models.revision import split_revision
from openkto.models.source_files import source_folder

log = logging.getLogger(__name__)

FIELDS = ("license", "license_name", "license_link")  # of a card's head


def licence_of(name: str) -> dict[str, Any]:
    """Return the fields of a model's card that give its licence; none where nobody says.

    Args:
        name: a folder, or a Hub name with or without a revision; then its card is fetched.
    """
    card = _card(name)
    known = _head(card) if card is not None else {}
    found: dict[str, Any] = {key: known[key] for key in FIELDS if isinstance(known.get(key), (str, list))}
    config = source_folder(name, "config.json")
    if not found and config is not None:
        said = json.loads((config / "config.json").read_text(encoding="utf-8")).get("license")
        found = {"license": said} if said else {}
    link = found.get("license_link")
    if link is not None and "://" not in link:  # a file beside the base model
        repository, revision = split_revision(name)
        del found["license_link"]
        if not Path(name).is_dir():
            found["license_link"] = f"https://huggingface.co/{repository}/blob/{revision or 'main'}/{link}"
    return found


def _card(name: str) -> Path | None:
    folder = source_folder(name, "README.md")
    if folder is not None:
        return folder / "README.md"
    if Path(name).is_dir():
        return None
    repository, revision = split_revision(name)
    try:
        return Path(hf_hub_download(repository, "README.md", revision=revision))
    except Exception as error:  # no network, no card, no access: the licence is unknown then, and the card says so
        log.debug("%s: its card could not be fetched (%s)", name, error)
        return None


def _head(card: Path) -> dict[str, Any]:
    try:
        return metadata_load(card) or {}
    except Exception as error:  # other people's YAML
        log.debug("%s: its head could not be read (%s)", card, error)
        return {}
