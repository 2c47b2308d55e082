"""Reads tokenizer.json itself and compares what transformers makes of it: ids within bounds, the same parts."""

import json
import logging
from pathlib import Path
from typing import Any

import tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.utils import cached_file

from openkto.errors import ConfigError
from openkto.models.revision import split_revision

log = logging.getLogger(__name__)

LARGEST_ID = 2**24  # sixty times the largest vocabulary there is
PARTS = ("normalizer", "pre_tokenizer", "decoder", "model")


def check_ids(pretrain: str) -> Path | None:
    """Return the model's tokenizer.json, if there is one, its ids being such as a library survives.

    Raises:
        ConfigError: one is beyond all bounds.
    """
    repository, revision = split_revision(pretrain)
    found = cached_file(
        repository,
        "tokenizer.json",
        revision=revision,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    if found is None:
        return None
    content = json.loads(Path(found).read_text(encoding="utf-8"))
    vocabulary = content["model"].get("vocab", {})
    ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else [len(vocabulary)]
    ids += [token["id"] for token in content.get("added_tokens") or []]
    largest = max(ids, default=0)
    if not 0 <= largest < LARGEST_ID:
        raise ConfigError(
            f"{pretrain}: the tokenizer's ids must be below {LARGEST_ID}; got {largest} in tokenizer.json. Name the "
            "model's own tokenizer."
        )
    return Path(found)


def as_its_file_says(pretrain: str, tokenizer: Any, file: Path | None) -> Any:
    """Return the tokenizer with the parts that its tokenizer.json gives it.

    transformers makes a tokenizer of the class that the configuration names and may put that class's parts in place
    of the model's own, which then gives other ids than the model was trained with.
    """
    if file is None or not tokenizer.is_fast:
        return tokenizer
    own = tokenizers.Tokenizer.from_file(str(file))
    replaced = replaced_parts(own, tokenizer)
    if not replaced:
        return tokenizer
    repository, revision = split_revision(pretrain)
    read = PreTrainedTokenizerFast.from_pretrained(repository, revision=revision or "main")
    left = replaced_parts(own, read)
    if left:
        log.warning(
            "warning: %s: transformers replaces the tokenizer's %s by those of %s: ids may differ from those that the "
            "model was trained with.", pretrain, " and ".join(left), type(read).__name__,
        )  # fmt: skip
        return read
    log.info(
        "%s: the tokenizer is read as its tokenizer.json says; transformers' %s has another %s",
        pretrain, type(tokenizer).__name__, " and ".join(replaced),
    )  # fmt: skip
    return read


def replaced_parts(own: tokenizers.Tokenizer, tokenizer: Any) -> list[str]:
    """Return which parts of a tokenizer are not those of its file."""
    loaded = tokenizer.backend_tokenizer
    return [part for part in PARTS if not _is_same(getattr(own, part), getattr(loaded, part))]


def _is_same(one: Any, other: Any) -> bool:
    states = [b"null" if part is None else part.__getstate__() for part in (one, other)]
    # A large vocabulary is parsed only where its bytes differ.
    return states[0] == states[1] or _settings(json.loads(states[0])) == _settings(json.loads(states[1]))


def _settings(value: Any) -> Any:
    """Return what a part does, without what is not set, and without the prefix space, which is a setting beside it."""
    if isinstance(value, dict):
        beside = ("add_prefix_space", "prepend_scheme")
        return {key: _settings(v) for key, v in value.items() if v not in (None, "", False) and key not in beside}
    return [_settings(v) for v in value] if isinstance(value, list) else value
