"""Writes the trained model as a Hugging Face folder, or its adapter as a peft folder.

Everything is written beside its place and moved there when complete, so a full disk leaves what was there before.
"""

import copy
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from peft import PeftModel
from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from openkto.errors import ConfigError, OpenKTOError
from openkto.files import flush_to_disk
from openkto.models.adapter import TRAINED, adapter_weights
from openkto.models.model_files import remove_exported
from openkto.models.revision import split_revision
from openkto.models.source_files import write_config, write_generation_config, write_tokenizer

# They come last into their place: where one is, the weights are too.
CONFIGS = ("config.json", "adapter_config.json")
SCRATCH = ".export-"
RECORDS_BYTES = 32 * 2**20  # tokenizer, metrics and the like


def check_space(folder: str | Path, num_parameters: int, dtype: torch.dtype) -> None:
    """Compare the free space with the size of the model that a run will save there, hours later.

    Raises:
        ConfigError: it would not fit now.
    """
    _clear(Path(folder))
    needed = num_parameters * dtype.itemsize + RECORDS_BYTES
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ConfigError(
            f"--save_path {folder}: the model and its records need {needed / 2**20:.0f} MiB; got "
            f"{free / 2**20:.0f} MiB free. Free some space or name another folder."
        )


def export_model(
    model: PreTrainedModel,
    weights: dict[str, Tensor],
    tokenizer: Any,
    folder: str | Path,
    dtype: torch.dtype,
    config_as_loaded: dict[str, float],
    *,
    check: Callable[[Path], None] = lambda _: None,
) -> None:
    """Write config, generation config, safetensors, tokenizer and chat template into `folder`.

    Args:
        weights: the state dict to save.
        dtype: of the weights.
        config_as_loaded: settings of the configuration that training changed, as they were.
        check: looks at the written files before they take their place, and raises OpenKTOError where they must not.

    Raises:
        OpenKTOError: the folder cannot be written.
    """
    settings = config_as_loaded | {"dtype": str(dtype).split(".")[1]}

    def write(scratch: Path) -> None:
        _write(model, weights, tokenizer, scratch, settings)
        check(scratch)

    _place(folder, write)


def export_adapter(model: PeftModel, weights: dict[str, Tensor], tokenizer: Any, folder: str | Path) -> None:
    """Write the adapter as peft reads it, with tokenizer and chat template, into `folder`.

    Args:
        weights: the state dict of what trains.

    Raises:
        OpenKTOError: the folder cannot be written.
    """

    def write(scratch: Path) -> None:
        save_file(adapter_weights(model, weights), scratch / "adapter_model.safetensors", metadata={"format": "pt"})
        known = copy.deepcopy(model.peft_config[TRAINED])
        known.inference_mode = True
        base = known.base_model_name_or_path or ""
        known.base_model_name_or_path, known.revision = split_revision(base)
        if os.path.isdir(base):
            # As it was given it would be found only from the folder that the run started in.
            known.base_model_name_or_path = os.path.abspath(base)
        known.save_pretrained(str(scratch))
        write_tokenizer(tokenizer, scratch)
        # peft leaves it out; a model that is merged of this adapter stops where this one was taught to.
        generation: Any = cast(PreTrainedModel, model.get_base_model()).generation_config
        if generation is not None:
            write_generation_config(generation, base, scratch)

    _place(folder, write)


def _clear(folder: Path) -> None:
    """Delete what a killed export left half."""
    for debris in folder.glob(f"{SCRATCH}*"):
        shutil.rmtree(debris, ignore_errors=True)


def _place(folder: str | Path, write: Callable[[Path], None]) -> None:
    """Let files be written beside their place, and move them there when they are complete.

    Raises:
        OpenKTOError: the folder cannot be written.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _clear(folder)
        with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=folder) as scratch:
            write(Path(scratch))
            _settle(Path(scratch))
            files = sorted(Path(scratch).iterdir(), key=lambda file: (file.name in CONFIGS, file.name))
            remove_exported(folder, kept={file.name for file in files})
            for file in files:
                if file.is_dir():
                    shutil.rmtree(folder / file.name, ignore_errors=True)
                os.replace(file, folder / file.name)
            flush_to_disk(folder)
    except OpenKTOError:
        raise
    except Exception as error:
        # safetensors and tokenizers have errors of their own for a full disk.
        raise OpenKTOError(
            f"{folder}: cannot save the model; got {type(error).__name__}: {error}. Free some space or name another "
            "--save_path."
        ) from error


def _settle(scratch: Path) -> None:
    """Put what was written on the disk, with the permissions of any new file: safetensors keeps others from reading."""
    (scratch / "any").touch()
    mode = (scratch / "any").stat().st_mode
    (scratch / "any").unlink()
    for path in scratch.rglob("*"):
        if path.is_file():
            path.chmod(mode)
        flush_to_disk(path)


def _write(
    model: PreTrainedModel, weights: dict[str, Tensor], tokenizer: Any, folder: Path, settings: dict[str, Any]
) -> None:
    generation = model.generation_config
    # A generation config with contradicting settings trains and generates, but transformers refuses to save it.
    model.generation_config = GenerationConfig()
    try:
        model.save_pretrained(folder, state_dict=weights)
    finally:
        model.generation_config = generation
    if generation is not None:
        write_generation_config(generation, model.name_or_path, folder)
    write_config(model.config, folder, settings)
    write_tokenizer(tokenizer, folder)
