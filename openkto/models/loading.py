"""Loading a causal language model and its tokenizer from a folder or the Hub, with clear errors.

Sharded loading under ZeRO-3 needs nothing here: it is on while `DeepspeedStrategy.model_loading()` is open.
"""

import logging
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

from openkto.config import is_adapter_folder
from openkto.errors import ConfigError
from openkto.models.adapter import base_of
from openkto.models.folder_checks import check_files, check_quantization, check_tokenizer_files
from openkto.models.kernels import use_liger_layers
from openkto.models.positions import check_row_lengths
from openkto.models.revision import split_revision
from openkto.models.tokenizer_file import as_its_file_says, check_ids
from openkto.process.limits import is_panic

log = logging.getLogger(__name__)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def load_model(
    pretrain: str,
    *,
    dtype: torch.dtype = torch.float32,
    attn_implementation: str = "auto",
    trust_remote_code: bool = False,
    load_in_4bit: bool = False,
    use_liger_kernel: bool = False,
) -> PreTrainedModel:
    """Return the causal language model of a folder or Hub name (owner/name or owner/name@revision).

    Of an adapter's folder it is the base model.

    Args:
        dtype: of the parameters.
        load_in_4bit: hold the linear layers' weights in 4 bits (QLoRA, arXiv:2305.14314v1: NF4, quantized twice).
        attn_implementation: `auto` takes flash-attention where it is there and can serve, else transformers' choice.
        use_liger_kernel: make it of the Liger package's layers.

    Raises:
        ConfigError: there is no such model, it is of another kind, or its weights do not fit its configuration.
    """
    attention = choose_attention(attn_implementation, dtype)
    config = load_config(pretrain, trust_remote_code)
    if use_liger_kernel:
        use_liger_layers(config)
    pretrain = base_of(pretrain)
    repository, revision = split_revision(pretrain)
    quantization = _in_4bit(dtype) if load_in_4bit else {}
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            repository,
            revision=revision,
            config=config,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            **({"attn_implementation": attention} if attention else {}),
            **quantization,
        )
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        # Other people's files in other people's code: whatever it raises is about that folder.
        raise ConfigError(_cannot_load(pretrain, error)) from error
    model, info = loaded
    model.name_or_path = model.config.name_or_path = pretrain
    _say_unexpected(pretrain, sorted(info["unexpected_keys"]))
    missing = sorted(info["missing_keys"]) + sorted(str(key) for key in info["mismatched_keys"])
    if missing:
        raise ConfigError(
            f"{pretrain}: the weights must hold every parameter of the configuration; got none for "
            f"{missing[0]} and {len(missing) - 1} more. Save the model again, or name its own folder."
        )
    return model


def _say_unexpected(pretrain: str, names: list[str]) -> None:
    """Warn of weights that the configuration has no place for: a layer too few in it is another model."""
    if names:
        log.warning(
            "warning: %s: the weights' files hold %d tensors that its configuration has no place for, such as %s; they "
            "are left out. Compare config.json with the model's own.", pretrain, len(names), names[0],
        )  # fmt: skip


def _in_4bit(dtype: torch.dtype) -> dict[str, Any]:
    """Return what makes transformers load in 4 bits.

    Raises:
        ConfigError: there is no GPU.
    """
    if not torch.cuda.is_available():
        raise ConfigError("--load_in_4bit: needs a CUDA GPU; got none. Leave it out.")
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    return {"quantization_config": quantization, "device_map": {"": torch.cuda.current_device()}}


def choose_attention(name: str, dtype: torch.dtype = torch.float32) -> str:
    """Return the attention implementation to ask transformers for; nothing leaves the choice to it.

    Raises:
        ConfigError: the one asked for is not installed.
    """
    half = dtype in (torch.bfloat16, torch.float16)
    if name == "auto":
        installed = {
            "flash_attention_3": is_flash_attn_3_available(),
            "flash_attention_2": is_flash_attn_2_available(),
        }
        best = next((kernel for kernel, is_there in installed.items() if is_there), "")
        return best if half and torch.cuda.is_available() else ""
    serves = {
        "flash_attention_2": is_flash_attn_2_available(),
        "flash_attention_3": is_flash_attn_3_available(),
        "flex_attention": torch.cuda.is_available(),  # it has no backward on a CPU
    }
    if not serves.get(name, True):
        raise ConfigError(
            f"--attn_implementation: {name} needs a GPU and its package; got neither or one of them. "
            "Pass auto, which takes the best that is there."
        )
    return name


def load_config(pretrain: str, trust_remote_code: bool = False) -> PretrainedConfig:
    """Return the configuration, refusing models that are not text-only decoders; an adapter's is its base model's.

    Raises:
        ConfigError: the folder is missing or broken, or the model has an encoder or sees images or sound.
    """
    pretrain = base_of(pretrain)
    repository, revision = split_revision(pretrain)
    _check_folder(repository)
    try:
        config = AutoConfig.from_pretrained(repository, revision=revision, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise ConfigError(_cannot_load(pretrain, error)) from error
    config.name_or_path = pretrain
    check_quantization(pretrain, config)
    if config.is_encoder_decoder:
        raise ConfigError(
            f"{pretrain}: the model must be only a decoder; got {config.model_type}, which has an encoder. "
            "Name a causal language model."
        )
    others = [name for name in ("vision_config", "audio_config") if name in config.to_dict()]
    if others:
        raise ConfigError(
            f"{pretrain}: the model must be for text only; got {config.model_type} with a "
            f"{others[0].split('_')[0]} part. Write its text model out, as docs/models.md shows, and name that."
        )
    return config


def check_same_vocabulary(tokenizer: Any, reference: str, trust_remote_code: bool = False) -> None:
    """Raise ConfigError where the reference comes with a tokenizer that gives other ids."""
    try:
        other = load_tokenizer(reference, trust_remote_code=trust_remote_code)
    except ConfigError:
        log.warning("warning: %s comes without a tokenizer; its vocabulary is taken to be the policy's.", reference)
        return
    if other.get_vocab() != tokenizer.get_vocab():
        raise ConfigError(
            f"--ref_pretrain {reference}: must have the policy's vocabulary, since log-probabilities are compared "
            "token by token; got another tokenizer. Name a model of the same family."
        )


def check_fits(pretrain: str, config: PretrainedConfig, longest: int, largest_id: int) -> str | None:
    """Compare the data with the model; return a warning, or nothing.

    Args:
        longest: tokens in the longest sequence.
        largest_id: the largest token id in the data.

    Raises:
        ConfigError: the model has no embedding for an id or, with learned or dynamic positions, for a position.
    """
    text = config.get_text_config()
    if largest_id >= text.vocab_size:
        raise ConfigError(
            f"{pretrain}: the tokenizer's ids must be below the model's vocabulary, {text.vocab_size}; got "
            f"{largest_id}. Name the model's own tokenizer folder, or resize the model's embeddings."
        )
    check_row_lengths(pretrain, config, longest)
    known = text.to_dict()
    positions = known.get("max_position_embeddings") or known.get("n_positions")
    if positions is None or longest <= positions:
        return None
    if not any("rope" in name for name in known):
        raise ConfigError(
            f"--max_len: the model {pretrain} has {positions} positions; got sequences of up to {longest} tokens. "
            f"Pass --max_len {positions}."
        )
    return f"sequences of up to {longest} tokens are longer than the {positions} that {pretrain} was made for."


def load_tokenizer(pretrain: str, *, use_fast: bool = True, trust_remote_code: bool = False):  # type: ignore[no-untyped-def]
    """Return the model's tokenizer; an adapter's is its own if it was saved with one, else its base model's.

    Raises:
        ConfigError: there is none, or it cannot be read.
    """
    if not Path(pretrain, "tokenizer_config.json").exists():
        pretrain = base_of(pretrain)
    repository, revision = split_revision(pretrain)
    if not is_adapter_folder(pretrain):
        _check_folder(repository)
    check_files(repository)
    try:
        file = check_ids(pretrain) if use_fast else None
        read = AutoTokenizer.from_pretrained(
            repository, revision=revision, use_fast=use_fast, trust_remote_code=trust_remote_code
        )
        tokenizer = as_its_file_says(pretrain, read, file)
        tokenizer.name_or_path = pretrain
        return tokenizer
    except ConfigError:
        raise
    except BaseException as error:  # the tokenizers library raises plain Exception for a broken file, or panics
        if not (isinstance(error, Exception) or is_panic(error)):
            raise
        check_tokenizer_files(repository)
        raise ConfigError(
            f"{pretrain}: cannot load the tokenizer: {_why(pretrain, error)} "
            "Check that the folder holds the model's tokenizer files."
        ) from error


def stop_token_ids(pretrain: str) -> tuple[int, ...]:
    """Return where the model's generation stops, by its generation_config; nothing where it has none."""
    try:
        repository, revision = split_revision(base_of(pretrain))
        ids = GenerationConfig.from_pretrained(repository, revision=revision or "main").eos_token_id
    except OSError:
        return ()
    return () if ids is None else tuple(ids) if isinstance(ids, list) else (int(ids),)


def _check_folder(pretrain: str) -> None:
    path = Path(pretrain)
    looks_local = path.is_absolute() or pretrain.startswith((".", "~")) or pretrain.count("/") > 1
    if looks_local and not path.exists():
        raise ConfigError(f"{pretrain}: no such folder. Check the path.")
    if path.is_file():
        raise ConfigError(f"{pretrain}: must be a model's folder; got a file. Name the folder that holds it.")
    if path.is_dir() and not (path / "config.json").exists():
        raise ConfigError(
            f"{pretrain}: a model's folder holds a config.json; got none. Name the folder that the model was saved to."
        )
    check_files(pretrain)


def _cannot_load(pretrain: str, error: Exception) -> str:
    if "trust_remote_code" in str(error):
        return (
            f"{pretrain}: the model comes with Python code of its own, which is not run unasked. "
            "Pass --trust_remote_code if you trust its author."
        )
    return f"{pretrain}: cannot load the model: {_why(pretrain, error)} Check the name, the files and the versions."


def _why(pretrain: str, error: BaseException) -> str:
    is_local = Path(split_revision(pretrain)[0]).exists()
    return ("" if is_local else "there is no such folder here, and from the Hub: ") + _first_line(error)


def _first_line(error: BaseException) -> str:
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return text if text.endswith((".", "!", "?")) else text + "."
