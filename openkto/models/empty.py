"""A model without its weights, on the meta device: for the names and sizes of its layers."""

from typing import Any

import peft
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from openkto.config import LoraConfig, PackingChoice, is_adapter_folder
from openkto.models.actor import Actor
from openkto.models.adapter import quiet_peft, read_adapter_config
from openkto.models.experts import expert_banks
from openkto.models.loading import load_config
from openkto.models.revision import split_revision


def empty_model(config: PretrainedConfig, trust_remote_code: bool = False) -> PreTrainedModel:
    """Return the causal language model of a configuration that `load_config` has read."""
    _, revision = split_revision(config.name_or_path or "")
    has_own_code = trust_remote_code and "auto_map" in config.to_dict()
    code = {"code_revision": revision} if has_own_code and revision is not None else {}
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code, **code)
    return model


def has_experts(config: PretrainedConfig, trust_remote_code: bool = False) -> bool:
    """Return whether a model of this configuration has experts."""
    return bool(expert_banks(empty_model(config, trust_remote_code)))


def empty_actor(
    pretrain: str,
    settings: LoraConfig,
    trust_remote_code: bool = False,
    *,
    dtype: torch.dtype = torch.float32,
    packing: PackingChoice = "auto",
    attn_implementation: str = "auto",
    share_prompts: PackingChoice = "auto",
) -> Actor:
    """Return the policy that training makes of a model or an adapter's folder, without its weights.

    Raises:
        ConfigError: as `load_config`, `Actor` and `read_adapter_config`.
    """
    model = empty_model(load_config(pretrain, trust_remote_code), trust_remote_code)
    model.to(dtype=dtype)  # type: ignore[call-arg]
    is_adapter = is_adapter_folder(pretrain)
    with torch.device("meta"), quiet_peft():
        lora = LoraConfig() if is_adapter else settings
        if attn_implementation == "eager":
            model.set_attn_implementation(attn_implementation)
        kernels: dict[str, Any] = {"packing": packing, "share_prompts": share_prompts}
        actor = Actor(model, attn_implementation=attn_implementation, lora=lora, **kernels)
        if is_adapter:
            known = read_adapter_config(pretrain)
            known.inference_mode = False
            actor.model = peft.get_peft_model(model, known, autocast_adapter_dtype=False)
    return actor


def describe_adapter(pretrain: str, settings: LoraConfig, trust_remote_code: bool = False) -> str:
    """Say what the adapter will change that training puts on a model, or starts from, and how much of it trains.

    Raises:
        ConfigError: as `empty_actor`.
    """
    actor = empty_actor(pretrain, settings, trust_remote_code)
    parameters = list(actor.parameters())
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    whole = sum(parameter.numel() for parameter in parameters)
    return f"{actor.describe_adapter()}; {trained} parameters train, of {whole}"
