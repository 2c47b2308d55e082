"""One hash over the files that a model is loaded from."""

import hashlib
import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download, try_to_load_from_cache

from openkto.errors import ConfigError
from openkto.files import hash_file
from openkto.models.revision import split_revision

# Weights and what shapes them; a tokenizer shows in the rows that it makes.
CONFIGS = ("config.json", "adapter_config.json")
WEIGHT_FILES = ("*.safetensors", "*.bin")
PATTERNS = (*WEIGHT_FILES, *CONFIGS)
# The names under which weights are looked for, in this order; an index names the files that hold them.
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")


def model_fingerprint(name: str) -> str:
    """Return a hash of a model's weights and configuration, the same wherever the files lie.

    Args:
        name: a folder, or a Hub name, with or without @revision, that `fetch` has brought into the local cache.

    Raises:
        ConfigError: a file cannot be read.
    """
    try:
        files = _files_of(name)
        with ThreadPoolExecutor(max_workers=4) as threads:  # hashing lets go of the interpreter's lock
            digests = list(threads.map(hash_file, files))
    except OSError as error:
        raise ConfigError(
            f"{name}: the model's files must be readable; got {error.filename or error} "
            f"({error.strerror or 'an error'}). Check the permissions and the disk."
        ) from error
    lines = "".join(f"{path.name} {digest}\n" for path, digest in zip(files, digests, strict=True))
    return hashlib.sha256(lines.encode()).hexdigest()[:16]


def fetch(names: list[str]) -> None:
    """Bring what models are loaded from into the Hub's local cache; a folder is there already.

    A cache that holds the whole model serves without a network.

    Raises:
        ConfigError: a model is not whole there and cannot be fetched, or its folder has no weights.
    """
    for name in names:
        if Path(name).is_dir():
            _check_weights(name)
        else:
            _fetch(name)


def _check_weights(folder: str) -> None:
    """Raise ConfigError for a model's or an adapter's folder without weights."""
    if not any(True for pattern in WEIGHT_FILES for _ in Path(folder).glob(pattern)):
        raise ConfigError(
            f"{folder}: must hold the model's weights; got no .safetensors and no .bin file there. Copy or download "
            "the whole model."
        )


def _fetch(name: str) -> None:
    try:
        repository, revision = split_revision(name)
        there = HfApi().list_repo_files(repository, revision=revision)
        wanted = [*CONFIGS, *_weights_among(there)]
        folder = Path(snapshot_download(repository, revision=revision, allow_patterns=wanted))
        shards = _shards(folder, wanted)
        if shards:
            snapshot_download(repository, revision=revision, allow_patterns=[*wanted, *shards])
    except Exception as error:  # a download fails in as many ways as there are layers below
        lacking = _lacking(name)
        if lacking is None:
            return
        why = str(error).strip().split("\n")[0] or type(error).__name__
        raise ConfigError(
            f"{name}: must be a model's folder, or be on the Hub or whole in its local cache; got no {lacking} there, "
            f"and the Hub cannot be asked: {why.rstrip('.')}. Check the name and the network, or fetch it beforehand."
        ) from error


def _files_of(name: str) -> list[Path]:
    """Return the files to hash. A folder of the Hub's cache may hold others, which somebody else fetched."""
    if Path(name).is_dir():
        return sorted({path for pattern in PATTERNS for path in Path(name).glob(pattern)})
    folder = _cached(name)
    if folder is None:
        return []
    wanted = [*CONFIGS, *_weights_among(path.name for path in folder.iterdir())]
    files = {folder / file for file in (*wanted, *_shards(folder, wanted)) if not file.endswith(".index.json")}
    return sorted(path for path in files if path.exists())


def _lacking(name: str) -> str | None:
    """Return what the local cache lacks of a model, or nothing where it is whole."""
    folder = _cached(name)
    if folder is None:
        return "config.json"
    weights = _weights_among(path.name for path in folder.iterdir())
    needed = [*weights, *_shards(folder, weights)]
    return next((file for file in needed if not (folder / file).exists()), None if needed else "weights")


def _cached(name: str) -> Path | None:
    """Return where the Hub's local cache holds a model, in the newest version that it knows or the one asked for."""
    repository, revision = split_revision(name)
    found = (try_to_load_from_cache(repository, config, revision=revision) for config in CONFIGS)
    return next((Path(path).parent for path in found if isinstance(path, str)), None)


def _weights_among(names: Iterable[str]) -> list[str]:
    """Return, of the files of a model, the one that holds its weights or names those that do."""
    there = set(names)
    found = (next((name for name in kind if name in there), None) for kind in (WEIGHTS, ADAPTER_WEIGHTS))
    return [name for name in found if name is not None]


def _shards(folder: Path, files: list[str]) -> list[str]:
    """Return the files that an index among these files names."""
    indices = [folder / name for name in files if name.endswith(".index.json")]
    maps = [json.loads(index.read_text(encoding="utf-8"))["weight_map"] for index in indices]
    return sorted({str(shard) for weights in maps for shard in weights.values()})
