"""What a run is: one frozen section per part of the program, each setting with its meaning, unit, default and range.

A setting's name is its flag (`--beta`) and its key in YAML (`beta`): names are unique over all sections. A part of the
program gets its own section or plain values, never the whole. `flags.py` reads them from the command line and YAML,
`checks.py` holds the rules between settings. Nothing in this folder imports torch or transformers, so that `--help`
answers at once.
"""

from openkto.config.data import TEMPLATE_ARGUMENTS, DataConfig
from openkto.config.entries import eval_sets, has_evaluation, path_of_entry, split_eval_set
from openkto.config.losses import LOSSES, LossFacts
from openkto.config.model import ALL_LINEAR, PACKING, LoraConfig, LossConfig, ModelConfig, PackingChoice
from openkto.config.option import Option, option
from openkto.config.output import HIGHER_IS_BETTER, CheckpointConfig, OutputConfig
from openkto.config.run import (
    SECTIONS,
    RunConfig,
    default_text,
    from_flat,
    from_yaml,
    is_adapter_folder,
    learning_rate_of,
    may_be_cached,
    openrlhf_differences,
    option_of,
    policy_name,
    ref_is_adapter,
    reference_name,
    settings,
    settings_for,
    shown_settings,
    to_flat,
    to_yaml,
    trains_adapter,
    with_resolved,
)
from openkto.config.samples import SamplesConfig
from openkto.config.training import (
    DEFAULT_LEARNING_RATE,
    DEFAULT_LORA_LEARNING_RATE,
    FLOORED_SCHEDULES,
    LR_SCHEDULERS,
    METRIC_SCHEDULERS,
    DeepspeedConfig,
    OptimConfig,
    TrainConfig,
)

__all__ = [
    "ALL_LINEAR",
    "DEFAULT_LEARNING_RATE",
    "DEFAULT_LORA_LEARNING_RATE",
    "FLOORED_SCHEDULES",
    "HIGHER_IS_BETTER",
    "LOSSES",
    "LR_SCHEDULERS",
    "METRIC_SCHEDULERS",
    "PACKING",
    "SECTIONS",
    "TEMPLATE_ARGUMENTS",
    "CheckpointConfig",
    "DataConfig",
    "DeepspeedConfig",
    "LoraConfig",
    "LossConfig",
    "LossFacts",
    "ModelConfig",
    "OptimConfig",
    "Option",
    "OutputConfig",
    "PackingChoice",
    "RunConfig",
    "SamplesConfig",
    "TrainConfig",
    "default_text",
    "eval_sets",
    "from_flat",
    "from_yaml",
    "has_evaluation",
    "is_adapter_folder",
    "learning_rate_of",
    "may_be_cached",
    "openrlhf_differences",
    "option",
    "option_of",
    "path_of_entry",
    "policy_name",
    "ref_is_adapter",
    "reference_name",
    "settings",
    "settings_for",
    "shown_settings",
    "split_eval_set",
    "to_flat",
    "to_yaml",
    "trains_adapter",
    "with_resolved",
]
