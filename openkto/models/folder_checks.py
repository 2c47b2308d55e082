"""Checks of a model's folder before a library reads it, since its files may come from strangers."""

import os
from pathlib import Path

from transformers import PretrainedConfig

from openkto.errors import ConfigError
from openkto.models.model_files import SAFETENSORS, TEMPLATES, TOKENIZERS, is_whole
from openkto.process.limits import kind_of_file

READ = (".json", ".safetensors", ".bin", ".model", ".jinja", ".txt", ".py")
LFS_POINTER = b"version https://git-lfs"
TRAINABLE_METHODS = ("bitsandbytes",)  # frozen below LoRA


def check_files(pretrain: str) -> None:
    """See that the files of a model's folder can be read to their end; a library would wait at a pipe without a word.

    Of weights only the header is read: hours of other work come before a library loads them.

    Raises:
        ConfigError: one is a pipe or a device, cannot be read, or holds a part of its weights.
    """
    if not os.path.isdir(pretrain):
        return
    try:
        for path in sorted([*Path(pretrain).iterdir(), *Path(pretrain, TEMPLATES).glob("*")]):
            if path.suffix not in READ and not _is_one_of(TOKENIZERS, path):
                continue
            kind = kind_of_file(path)
            if kind is not None:
                raise ConfigError(f"{path}: a model's files must be plain files; got {kind}. Remove it.")
            if not os.access(path, os.R_OK):
                raise PermissionError(13, "Permission denied", str(path))
            if _is_one_of(SAFETENSORS, path) and not is_whole(path):
                raise ConfigError(f"{path}: must hold all of its weights; got {_what_is_there(path)}")
    except OSError as error:
        raise ConfigError(
            f"{pretrain}: the model's files must be readable; got {error.filename or error} "
            f"({error.strerror or 'an error'}). Check the permissions and the disk."
        ) from error


def _what_is_there(path: Path) -> str:
    """Say what lies in the place of whole weights, and the cure."""
    with path.open("rb") as file:
        if file.read(len(LFS_POINTER)) == LFS_POINTER:
            return "a pointer of Git LFS. Run `git lfs pull` in that folder."
    return f"a file of {path.stat().st_size} bytes that is cut or damaged. Download or copy it again."


def _is_one_of(patterns: tuple[str, ...], path: Path) -> bool:
    return any(path.match(pattern) for pattern in patterns)


def check_tokenizer_files(folder: str) -> None:
    """Raise ConfigError for a local folder without any file of a tokenizer; a library says so in riddles."""
    if os.path.isdir(folder) and not any(_is_one_of(TOKENIZERS, path) for path in Path(folder).iterdir()):
        raise ConfigError(
            f"{folder}: must hold the model's tokenizer; got no file of one. Copy tokenizer.json and "
            "tokenizer_config.json from the model that it was made of."
        )


def check_quantization(pretrain: str, config: PretrainedConfig) -> None:
    """Raise ConfigError for a checkpoint whose weights are quantized, which training cannot change."""
    quantization = config.to_dict().get("quantization_config")
    if not quantization:
        return
    method = quantization.get("quant_method", "an unknown method") if isinstance(quantization, dict) else quantization
    if method not in TRAINABLE_METHODS:
        raise ConfigError(
            f"{pretrain}: the model must be unquantized, as training changes its weights; got one quantized by "
            f"{method} (quantization_config in config.json). Name the model that it was made from, or a copy in bf16."
        )
