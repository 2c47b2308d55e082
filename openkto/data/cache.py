"""Keep tokenised rows on disk under a key of everything that they depend on; made once, and complete or not there.

A preparation writes into a temporary folder beside its place and is renamed into it at the end. One that is killed
leaves a folder that nothing reads; of two that race, one wins and both use the winner's.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers
import transformers

from openkto.errors import ConfigError
from openkto.files import flush_to_disk

# To be raised whenever the same data and settings give other tokens, or other columns.
FORMAT_VERSION = 5
REPORT_FILE = "report.json"
ROWS_FILE = "rows.arrow"


def default_cache_dir() -> Path:
    """Return $OPENKTO_CACHE, or ~/.cache/openkto."""
    return Path(os.environ.get("OPENKTO_CACHE") or "~/.cache/openkto").expanduser()


def cache_key(source_digests: list[str], tokenizer: Any, settings: dict[str, object]) -> str:
    """Return the sha256 over data, tokenizer, settings and the versions of what makes the tokens."""
    parts = {
        "format": FORMAT_VERSION,
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
        "sources": source_digests,
        "tokenizer": _tokenizer_digest(tokenizer),
        "settings": settings,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def cached_folder(cache_dir: Path, key: str, build: Callable[[Path], None]) -> Path:
    """Return the complete folder of a key, built first where it is not there yet.

    `build` fills the folder that it is given. Raises ConfigError where the cache cannot be written.
    """
    folder = cache_dir / key
    if (folder / REPORT_FILE).is_file():
        return folder
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f"{key}.", dir=cache_dir))
    except OSError as error:
        raise _cannot_write(cache_dir, error) from None
    try:
        build(temporary)
        for file in temporary.iterdir():
            flush_to_disk(file)
        temporary.chmod(0o755)
        try:
            temporary.rename(folder)
        except OSError:
            if not (folder / REPORT_FILE).is_file():
                raise
    except OSError as error:
        raise _cannot_write(cache_dir, error) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _tokenizer_digest(tokenizer: Any) -> str:
    if tokenizer.is_fast:
        content = json.loads(tokenizer.backend_tokenizer.to_str())
        # Padding and truncation are whatever the last call left behind; every call here sets its own.
        del content["padding"], content["truncation"]
    else:
        content = [type(tokenizer).__name__, tokenizer.get_vocab(), repr(tokenizer)]
    parts = [content, tokenizer.special_tokens_map, tokenizer.chat_template]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def _cannot_write(cache_dir: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"data_cache_dir: must be a folder that can be written; got {cache_dir} ({error.strerror or error})."
        " Pass --data_cache_dir FOLDER with room for the tokenised rows."
    )
