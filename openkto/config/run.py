"""A whole run: all sections, their settings by flat names, YAML, and values that depend on several settings."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import yaml

from openkto.config.data import DataConfig
from openkto.config.model import LoraConfig, LossConfig, ModelConfig
from openkto.config.option import Option
from openkto.config.output import CheckpointConfig, OutputConfig
from openkto.config.samples import SamplesConfig
from openkto.config.training import (
    DEFAULT_LEARNING_RATE,
    DEFAULT_LORA_LEARNING_RATE,
    DeepspeedConfig,
    OptimConfig,
    TrainConfig,
)
from openkto.masking import masked_value


@dataclass(frozen=True)
class RunConfig:
    """Everything that a run depends on, and nothing else."""

    model: ModelConfig
    lora: LoraConfig = field(default_factory=LoraConfig)
    data: DataConfig = field(default_factory=DataConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    deepspeed: DeepspeedConfig = field(default_factory=DeepspeedConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    samples: SamplesConfig = field(default_factory=SamplesConfig)
    output: OutputConfig = field(default_factory=OutputConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)


SECTIONS: dict[str, type] = {
    "model": ModelConfig,
    "lora": LoraConfig,
    "data": DataConfig,
    "loss": LossConfig,
    "optim": OptimConfig,
    "deepspeed": DeepspeedConfig,
    "train": TrainConfig,
    "samples": SamplesConfig,
    "output": OutputConfig,
    "checkpoint": CheckpointConfig,
}


@functools.cache
def settings() -> dict[str, dataclasses.Field[Any]]:
    """Return every setting's dataclass field by its flat name, in the order of the sections; not to be written to."""
    return {item.name: item for section in SECTIONS.values() for item in dataclasses.fields(section)}


def option_of(name: str) -> Option:
    """Return what is known of a setting besides its type and default."""
    known: Option = settings()[name].metadata["option"]
    return known


def default_text(item: dataclasses.Field[Any]) -> str:
    """Say a setting's default as a user would type it, or what an absent value means."""
    known: Option = item.metadata["option"]
    if known.default_text:
        return known.default_text
    if item.default is dataclasses.MISSING:
        return "required"
    if isinstance(item.default, bool):
        return "on" if item.default else "off"
    if isinstance(item.default, tuple):
        return " ".join(str(part) for part in item.default)
    return str(item.default)


def from_flat(values: dict[str, Any]) -> RunConfig:
    """Build a `RunConfig` from flat names; `pretrain` must be among them."""
    parts = {}
    for name, section in SECTIONS.items():
        own = {item.name for item in dataclasses.fields(section)}
        parts[name] = section(**{key: value for key, value in values.items() if key in own})
    return RunConfig(**parts)


def to_flat(config: RunConfig) -> dict[str, Any]:
    """Return every setting by its flat name."""
    return {key: value for section in dataclasses.asdict(config).values() for key, value in section.items()}


def shown_settings(config: RunConfig) -> dict[str, Any]:
    """Return every setting as it may be written down and shown: an address without its user and its key."""
    return {name: masked_value(value) for name, value in to_flat(config).items()}


def settings_for(takes: Callable[..., Any], *sections: Any) -> dict[str, Any]:
    """Return the settings of the sections that a class or function takes, as its keyword arguments.

    Args:
        takes: a class or function; those of its parameters with a setting's name mean what the setting does.
    """
    names = inspect.signature(takes).parameters
    return {name: value for section in sections for name, value in vars(section).items() if name in names}


def with_resolved(config: RunConfig, **values: Any) -> RunConfig:
    """Return the configuration with some settings replaced, such as a dtype that is known only on the device."""
    unknown = values.keys() - settings().keys()
    assert not unknown, f"no such setting: {sorted(unknown)}"
    return from_flat({**to_flat(config), **values})


def to_yaml(config: RunConfig) -> str:
    """Return the YAML text that starts the same run again with `--config`.

    Absent values are left out, and so is what belongs to this start of it: how to resume, when to stop early. An
    address with a password or a key has to be given again.
    """
    kept = {
        name: value
        for name, value in shown_settings(config).items()
        if value not in (None, []) and not option_of(name).of_one_start
    }
    plain = {key: list(value) if isinstance(value, tuple) else value for key, value in kept.items()}
    # Escaped beyond ASCII: written raw, a next-line character (U+0085) would come back as a space.
    return yaml.safe_dump(plain, sort_keys=False)


def from_yaml(text: str) -> dict[str, Any]:
    """Return the settings that `to_yaml` wrote, by their flat names, without checking them.

    Raises:
        ValueError: the text is not a YAML mapping.
    """
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"no YAML: {error}") from error
    if not isinstance(values, dict):
        raise ValueError("no YAML mapping")
    return {str(name): value for name, value in values.items()}


def is_adapter_folder(pretrain: str) -> bool:
    """Return whether a name is the folder of a peft adapter."""
    return os.path.isfile(os.path.join(pretrain, "adapter_config.json"))


def policy_name(model: ModelConfig) -> str:
    """Return the name that the policy starts from, as owner/name@revision where a revision is asked for."""
    return f"{model.pretrain}@{model.revision}" if model.revision else model.pretrain


def reference_name(model: ModelConfig) -> str:
    """Return the reference's name in the same form; by default it is the policy's."""
    revision = model.ref_revision
    if model.ref_pretrain in (None, model.pretrain):
        revision = revision or model.revision
    name = model.ref_pretrain or model.pretrain
    return f"{name}@{revision}" if revision else name


def trains_adapter(config: RunConfig) -> bool:
    """Return whether only an adapter trains: a new one, or that of the folder that training starts from."""
    return config.lora.lora_rank > 0 or is_adapter_folder(config.model.pretrain)


def learning_rate_of(config: RunConfig) -> float:
    """Return the highest learning rate of the schedule: the given one, or the default for what trains."""
    default = DEFAULT_LORA_LEARNING_RATE if trains_adapter(config) else DEFAULT_LEARNING_RATE
    return config.optim.learning_rate or default


def ref_is_adapter(model: ModelConfig, *, has_adapter: bool) -> bool:
    """Return whether the reference is the policy itself, with its adapter off or as it started."""
    is_other = reference_name(model) != policy_name(model)
    return model.ref_mode == "adapter" or (model.ref_mode == "auto" and has_adapter and not is_other)


def may_be_cached(config: RunConfig, *, has_adapter: bool) -> bool:
    """Return whether the reference may be read from a cache, because it is asked for or by `auto`."""
    moves = config.model.ref_sync_steps > 0
    if moves or config.loss.facts.by_token or ref_is_adapter(config.model, has_adapter=has_adapter):
        return False
    return config.model.ref_mode in ("auto", "cached")


def openrlhf_differences(given: frozenset[str] | set[str], *, use_wandb: bool = False) -> list[str]:
    """Return a line for each default that differs from OpenRLHF 0.9's and was not given: "beta: 0.1 (OpenRLHF: 0.01)".

    W&B's names are left out unless it is on.
    """
    return [
        f"{name}: {default_text(item)} (OpenRLHF: {item.metadata['option'].openrlhf})"
        for name, item in settings().items()
        if item.metadata["option"].openrlhf and name not in given and (use_wandb or not name.startswith("wandb_"))
    ]
