"""The small files of the model that training started from, for an export: as they are where training changed nothing.

transformers writes them in its own version's way, which servers on an older one cannot read, or read wrongly.
"""

import filecmp
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from transformers import GenerationConfig, PretrainedConfig

from openkto.models.model_files import TOKENIZER_FILES
from openkto.models.revision import split_revision

# Written by every version as it names itself, so that a difference is none of training's.
NOT_COMPARED = ("transformers_version", "_name_or_path", "architectures", "dtype", "torch_dtype")


def source_folder(name: str | None, file: str) -> Path | None:
    """Return the local folder, in the Hub's cache for a Hub name, where a model's file lies; None where it does not."""
    if not name:  # a model made in code
        return None
    if Path(name).is_dir():
        return Path(name) if Path(name, file).is_file() else None
    try:
        repository, revision = split_revision(name)
        found = try_to_load_from_cache(repository, file, revision=revision)
    except HFValidationError:  # a folder that is there no more
        return None
    return Path(found).parent if isinstance(found, str) else None


def write_config(config: PretrainedConfig, folder: Path, settings: dict[str, Any]) -> None:
    """Put the source's config.json with what training changed, and the dtype, in place of transformers' in `folder`.

    Args:
        config: of the trained model.
        settings: to write beside, as they were when the model was loaded; `dtype` among them.
    """
    file, source = folder / "config.json", source_folder(config.name_or_path, "config.json")
    written = _read(file) | settings
    as_read = type(config).from_pretrained(source) if source is not None else config
    if source is not None and as_read.model_type == _read(source / "config.json").get("model_type"):
        original = _read(source / "config.json")
        changed = _difference(written, json.loads(as_read.to_json_string(use_diff=True)))
        dtype = "torch_dtype" if "torch_dtype" in original else "dtype"
        written = original | changed | {dtype: settings["dtype"]}
        if "auto_map" in original:
            for code in source.glob("*.py"):
                shutil.copy(code, folder)
    file.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")


def write_generation_config(generation: GenerationConfig, name: str | None, folder: Path) -> None:
    """Write a generation_config.json into `folder`: the source's with what differs from it.

    One with contradicting settings trains and generates, but transformers refuses to save it.
    """
    written = json.loads(generation.to_json_string(use_diff=True))
    source = source_folder(name, "generation_config.json")
    if source is not None:
        as_read = json.loads(GenerationConfig.from_pretrained(source).to_json_string(use_diff=True))
        written = _read(source / "generation_config.json") | _difference(written, as_read)
    (folder / "generation_config.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")


def write_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Copy the files that the tokenizer was read from into `folder`, or write them where it is another by now."""
    source = source_folder(tokenizer.name_or_path, "tokenizer_config.json")
    if source is None or not _is_as_read(tokenizer, source):
        tokenizer.save_pretrained(folder)
        return
    for path in {path for pattern in TOKENIZER_FILES for path in source.glob(pattern)}:
        if path.is_dir():
            shutil.copytree(path, folder / path.name)
        else:
            shutil.copy(path, folder)


def _is_as_read(tokenizer: Any, source: Path) -> bool:
    """Return whether the tokenizer in use writes what one writes that is read from its folder now."""
    with tempfile.TemporaryDirectory() as scratch:
        mine, read = Path(scratch, "mine"), Path(scratch, "read")
        tokenizer.save_pretrained(mine)
        type(tokenizer).from_pretrained(source).save_pretrained(read)
        names = sorted(path.name for path in mine.iterdir())
        if names != sorted(path.name for path in read.iterdir()):
            return False
        return not any(filecmp.cmpfiles(mine, read, names, shallow=False)[1:])


def _difference(written: dict[str, Any], as_read: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in written.items() if key not in NOT_COMPARED and as_read.get(key) != value}


def _read(file: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return content
