"""Keep tokenised rows on disk under a key of everything that they depend on; made once, and complete or not there.

A preparation writes into a temporary folder beside its place and is renamed into it at the end. One that is killed
leaves a folder that nothing reads and a later preparation deletes; of two that race, one wins and both use the
winner's. Each start compares the files with the hashes that were written with them, and makes damaged ones again. The
hash is xxh3, which is as fast as memory: it is there against bad disks and slips, not against who may write the cache.
"""

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers
import transformers
import xxhash

from openkto.errors import ConfigError
from openkto.files import delete, delete_leftovers, flush_to_disk, hash_file, scratch_name

log = logging.getLogger(__name__)

# To be raised whenever the same data and settings give other tokens, other columns or other notes.
FORMAT_VERSION = 14
REPORT_FILE = "report.json"
ROWS_FILE = "rows.arrow"
HASHES_FILE = "hashes.json"
# What a tokenizer holds besides what changes ids: where it lies, and what its last call left behind.
NOT_OF_THE_IDS = {
    *("name_or_path", "init_inputs", "is_local", "local_files_only", "files_loaded", "_commit_hash"),
    *("verbose", "deprecation_warnings", "_in_target_context_manager", "model_max_length"),
    *("padding_side", "truncation_side"),
}


def cache_folder(given: str | Path | None) -> Path:
    """Return the folder that is given, else the default one."""
    return Path(given).expanduser() if given is not None else default_cache_dir()


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


def cached_folder(cache_dir: Path, key: str, build: Callable[[Path], None], *, always_builds: bool = False) -> Path:
    """Return the complete folder of a key, built first where it is not there or not as it was written.

    `build` fills the folder that it is given; with `always_builds` it is called even though the rows are there.

    Raises ConfigError where the cache cannot be read or written.
    """
    folder = cache_dir / key
    try:
        is_there = folder.is_dir()
        is_good = is_there and is_as_written(folder)
        if is_good and not always_builds:
            return folder
        if is_there and not is_good:
            log.warning("warning: %s: the cached rows are damaged, and are made again", folder)
        cache_dir.mkdir(parents=True, exist_ok=True)
        delete_leftovers(cache_dir)
        temporary = cache_dir / scratch_name(key)
        temporary.mkdir()
    except OSError as error:
        raise _cannot_use(cache_dir, error) from None
    try:
        build(temporary)
        write_hashes(temporary)
        for file in temporary.iterdir():
            flush_to_disk(file)
        _put_in_place(temporary, folder)
    except OSError as error:
        raise _cannot_use(cache_dir, error) from None
    finally:
        delete(temporary)
    return folder


def write_hashes(folder: Path) -> None:
    """Write down what a folder's files are, for `is_as_written`."""
    hashes = {file.name: _hash(file) for file in folder.iterdir()}
    (folder / HASHES_FILE).write_text(json.dumps(hashes), encoding="utf-8")


def is_as_written(folder: Path) -> bool:
    """Whether a folder's files are those that its hashes were written of."""
    try:
        hashes = json.loads((folder / HASHES_FILE).read_text(encoding="utf-8"))
        return {REPORT_FILE, ROWS_FILE} <= set(hashes) and all(
            _hash(folder / name) == hashed for name, hashed in hashes.items()
        )
    except (FileNotFoundError, ValueError, TypeError):
        return False


def _hash(file: Path) -> str:
    return hash_file(file, xxhash.xxh3_128)


def _put_in_place(temporary: Path, folder: Path) -> None:
    """Rename what is complete; what another process has put there meanwhile is as good, and what is damaged goes."""
    if folder.exists() and not is_as_written(folder):
        aside = folder.with_name(scratch_name(folder.name))
        folder.rename(aside)  # who has it open can still read it
        delete(aside)
    try:
        temporary.rename(folder)
    except OSError:
        if not is_as_written(folder):
            raise


def _tokenizer_digest(tokenizer: Any) -> str:
    """Return a hash of everything in a tokenizer that its ids depend on, wherever it lies and whatever it did last."""
    state = {name: value for name, value in vars(tokenizer).items() if name not in NOT_OF_THE_IDS}
    given = {
        name: value
        for name, value in state.pop("init_kwargs").items()
        if name not in NOT_OF_THE_IDS and not name.endswith("_file")
    }
    backend = state.pop("_tokenizer", None)
    content: Any = None
    if tokenizer.is_fast:
        content = json.loads(backend.to_str())
        # Padding and truncation are whatever the last call left behind; every call here sets its own.
        del content["padding"], content["truncation"]
    else:
        content = [tokenizer.get_vocab(), _vocabulary_files(tokenizer)]
    parts = [type(tokenizer).__name__, content, given, state, tokenizer.special_tokens_map]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=_plain).encode()).hexdigest()


def _plain(value: Any) -> Any:
    """Return what stands for a value that JSON has no form for, the same in every process."""
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=repr)
    return repr(value) if isinstance(value, tokenizers.AddedToken) else type(value).__name__


def _vocabulary_files(tokenizer: Any) -> list[str]:
    """Return the hashes of the files that a slow tokenizer is made of, as it writes them itself."""
    with tempfile.TemporaryDirectory() as folder:
        return [_hash(Path(file)) for file in tokenizer.save_vocabulary(folder)]


def _cannot_use(cache_dir: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"data_cache_dir: must be a folder that can be read and written; got {cache_dir} ({error.strerror or error})."
        " Pass --data_cache_dir FOLDER with room for the tokenised rows."
    )
