"""LoRA adapters through peft: put on a model, read from a folder, switched off for the reference.

peft tells adapters apart by name. `TRAINED` is the one that trains and is saved; `START` is a frozen copy of the
adapter that training started from, there only where the policy is its own reference.
"""

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator
from typing import Any

import peft
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper
from torch import Tensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from openkto.config import ALL_LINEAR, LoraConfig, is_adapter_folder
from openkto.errors import ConfigError
from openkto.models.folder_checks import check_files
from openkto.models.lora_targets import choose_targets
from openkto.models.revision import with_revision
from openkto.process.limits import match_in_time

log = logging.getLogger(__name__)

TRAINED, START = "default", "start"
PLAIN_STARTS = ("gaussian", "orthogonal")  # ways to begin an adapter that do not change the base's weights


def add_lora(model: PreTrainedModel, settings: LoraConfig) -> peft.PeftModel:
    """Return the model with a new adapter, whose B matrices are 0: it computes what the model did.

    The adapter has the model's dtype; DeepSpeed keeps float32 masters of what trains.

    Raises:
        ConfigError: a name in the settings is of nothing in the model, or of what cannot be adapted.
    """
    targets = choose_targets(model, settings)
    known = peft.LoraConfig(
        task_type=peft.TaskType.CAUSAL_LM,
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha,
        target_modules=ALL_LINEAR if targets.modules == [ALL_LINEAR] else list(targets.modules),
        target_parameters=targets.parameters or None,
        lora_dropout=settings.lora_dropout,
        use_rslora=settings.use_rslora,
        use_dora=settings.use_dora,
        modules_to_save=list(settings.lora_modules_to_save) or None,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
    )
    with quiet_peft():
        adapted = peft.get_peft_model(model, known, adapter_name=TRAINED, autocast_adapter_dtype=False)
    _check_head(adapted, "--target_modules")
    return adapted


def load_adapter(
    model: PreTrainedModel, folder: str, *, lora_dropout: float = 0.0, keeps_start: bool = False
) -> peft.PeftModel:
    """Return the model with the adapter of a folder, ready to train further.

    Args:
        lora_dropout: instead of the one that the adapter was trained with.
        keeps_start: also keep a frozen copy of it, for `reference_weights`.

    Raises:
        ConfigError: the folder holds no LoRA adapter for this model.
    """
    known = read_adapter_config(folder)
    if lora_dropout and known.target_parameters:
        raise ConfigError(
            f"--lora_dropout: cannot go with an adapter on experts, such as that of {folder}; got {lora_dropout:g}. "
            "Leave it out."
        )
    known.lora_dropout, known.inference_mode = lora_dropout, False
    known.base_model_name_or_path = model.name_or_path
    _check_patterns(folder, known, model)
    loading: dict[str, Any] = {"torch_device": "cpu", "autocast_adapter_dtype": False}
    try:
        with quiet_peft():
            adapted = peft.get_peft_model(model, known, adapter_name=TRAINED, autocast_adapter_dtype=False)
            found = adapted.load_adapter(folder, adapter_name=TRAINED, is_trainable=True, **loading)
            if keeps_start:
                adapted.load_adapter(folder, adapter_name=START, is_trainable=False, **loading)
    except Exception as error:  # whatever other people's files lead to in peft
        raise ConfigError(
            f"{folder}: cannot load the adapter on {model.name_or_path}: {_one_line(error)} Check its files, and that "
            "the base model is the one that it was trained on."
        ) from error
    wrong = sorted(found.missing_keys) + sorted(found.unexpected_keys)
    if wrong:
        raise ConfigError(
            f"{folder}: the adapter's weights must be those of its configuration on {model.name_or_path}; got a "
            f"difference in {wrong[0]} and {len(wrong) - 1} more. Save the adapter again, or correct its base model."
        )
    _check_head(adapted, folder)
    return adapted


def read_adapter_config(folder: str) -> peft.LoraConfig:
    """Return the configuration of an adapter's folder.

    Raises:
        ConfigError: it cannot be read, is of another kind than LoRA, or changes more than switching it off undoes.
    """
    check_files(folder)
    try:
        known = peft.PeftConfig.from_pretrained(folder)
    except Exception as error:
        raise ConfigError(
            f"{folder}: cannot read adapter_config.json: {_one_line(error)} Save the adapter again."
        ) from error
    if not isinstance(known, peft.LoraConfig):
        raise ConfigError(
            f"{folder}: must be a LoRA adapter; got {str(known.peft_type).removeprefix('PeftType.')}. Name one that is."
        )
    if not (isinstance(known.init_lora_weights, bool) or known.init_lora_weights in PLAIN_STARTS):
        raise ConfigError(
            f"{folder}: the adapter must not change its base model; got one made by {known.init_lora_weights}, which "
            "changes it. Convert it to plain LoRA with peft."
        )
    if known.bias != "none":
        raise ConfigError(
            f"{folder}: the adapter must not change biases; got bias {known.bias!r}. Train one with bias 'none'."
        )
    return known


def base_of(pretrain: str) -> str:
    """Return the model that an adapter's folder names as its base, with its revision; any other name as it is.

    Raises:
        ConfigError: the adapter names no base, or a folder that is not there.
    """
    if not is_adapter_folder(pretrain):
        return pretrain
    known = read_adapter_config(pretrain)
    base = known.base_model_name_or_path
    if not base or (os.path.isabs(base) and not os.path.isdir(base)):
        raise ConfigError(
            f"{pretrain}: adapter_config.json must name the base model; got {base or 'none'}"
            f"{', no folder' if base else ''}. Correct base_model_name_or_path there."
        )
    return base if os.path.isdir(base) else with_revision(base, known.revision)


@contextlib.contextmanager
def reference_weights(model: peft.PeftModel) -> Iterator[None]:
    """Inside, the model computes what it did when training started."""
    if START not in model.peft_config:
        with model.disable_adapter():
            yield
        return
    model.set_adapter(START, inference_mode=True)
    try:
        yield
    finally:
        model.set_adapter(TRAINED)


def adapter_weights(model: peft.PeftModel, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the trained adapter's tensors under peft's names in files, out of a state dict of what trains.

    Shared storage is broken up, which safetensors refuses.
    """
    found = peft.get_peft_model_state_dict(model, state_dict=weights, adapter_name=TRAINED, save_embedding_layers=False)
    empty = [name for name, tensor in found.items() if tensor.numel() == 0]
    assert found, "an adapter has tensors"
    assert not empty, f"an adapter is saved whole: {empty[:3]}"
    return {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in found.items()}


def _check_patterns(folder: str, known: peft.LoraConfig, model: PreTrainedModel) -> None:
    """Raise where a regular expression that the adapter names modules by does not come to an end on the model's."""
    names = [name for name, _ in model.named_modules()]
    given = [known.target_modules, known.exclude_modules, known.layers_pattern]
    patterns = [pattern for pattern in given if isinstance(pattern, str)]
    patterns += [rf"(.*\.)?({key})" for key in (*(known.rank_pattern or {}), *(known.alpha_pattern or {}))]
    for pattern in patterns:
        problem = match_in_time(pattern, names)
        if problem is not None:
            raise ConfigError(
                f"{folder}: adapter_config.json must name modules by expressions that can be matched; got "
                f"{pattern[:60]!r} ({problem}). Name the modules by the ends of their names."
            )


@contextlib.contextmanager
def quiet_peft() -> Iterator[None]:
    """Inside, peft does not warn of tied weights, which are dealt with here and in `merging.py`, nor of experts' ranks.

    These it applies, but looks for the names in `rank_pattern` and `alpha_pattern` among modules only.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Model (has|with) `tie_word_embeddings=True`")
        warnings.filterwarnings("ignore", message="The following (rank|alpha)_pattern keys did not match any targeted")
        warnings.filterwarnings("ignore", message="Input and output embeddings are no longer tied")
        yield


def _check_head(adapted: peft.PeftModel, place: str) -> None:
    """Raise where the adapter changes the head without its weight, which is used in chunks; say where a tie is cut."""
    model: Any = adapted.get_base_model()
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if isinstance(head, BaseTunerLayer):
        raise ConfigError(
            f"{place}: the head cannot be adapted; got one with LoRA on it. Name it in --lora_modules_to_save, which "
            "trains it whole, or leave it out."
        )
    if isinstance(head, TrainableTokensWrapper):
        raise ConfigError(
            f"{place}: single tokens of the head cannot be trained; got trainable_token_indices for it, since it "
            "shares the embedding's weight or is named there. Train an adapter with the embedding in modules_to_save."
        )
    shared = _without_adapter(head).weight is _without_adapter(embedding).weight
    if shared and (isinstance(embedding, BaseTunerLayer) or head.weight is not embedding.weight):
        log.warning(
            "warning: %s: embedding and head share one weight in this model, and no longer do with this adapter. "
            "merge_lora gives each its own; other programs' merging may not.",
            place,
        )


def _without_adapter(layer: Any) -> Any:
    if isinstance(layer, ModulesToSaveWrapper):
        return layer.original_module
    return layer.get_base_layer() if isinstance(layer, BaseTunerLayer) else layer


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())[:200] or type(error).__name__
    return text if text.endswith((".", "!", "?")) else f"{text}."
