"""Which weights of a model a LoRA adapter changes, chosen by name before peft sees the names.

transformers keeps a layer's experts in parameters of three dimensions, which peft adapts by parameter instead of by
layer. For many types of models peft also reads the layers' names as those of an older transformers: it takes a
`gate_proj` or `down_proj` for a part of an expert wherever it stands (`_convert_peft_config_moe`, peft 0.21), so that
the same layer of a dense MLP or of a shared expert would stay as it is, and the router would train. What peft would
read so is named by its weight instead, in the adapter's file, too, which any peft then takes as it is meant.
"""

import logging
import re
from collections import Counter
from typing import Any, NamedTuple

import peft
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from openkto.config import ALL_LINEAR, LoraConfig
from openkto.errors import ConfigError
from openkto.models.experts import CONVOLUTIONS, expert_banks, unsharded_shape

log = logging.getLogger(__name__)

LINEAR = (nn.Linear, Conv1D)
ADAPTABLE = (*LINEAR, nn.Embedding)
# Lists of names are passed on from model to model; of these, a model need not have all.
USUAL_NAMES = frozenset(("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"))
# What experts' parameters were called when each expert had layers of its own: all of one tuple make the parameter.
FORMER_NAMES = {"gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")), "down_proj": (("w2",),)}
ROUTER = re.compile(r"(\w+_)?(gate|router)")


class Targets(NamedTuple):
    """What peft is told."""

    modules: list[str]  # `all-linear`, or names or their ends
    parameters: list[str]  # whole names


def choose_targets(model: PreTrainedModel, settings: LoraConfig) -> Targets:
    """Return the layers and parameters that the settings name.

    The experts are those of --target_parameters, or, without it, those that --target_modules names. all-linear has no
    head and no router.

    Raises:
        ConfigError: a name is of nothing that can be adapted, or the settings do not go with a parameter's adapter.
    """
    layers = {key: module for key, module in model.named_modules() if isinstance(module, ADAPTABLE)}
    weights, names = stacked_weights(model), settings.target_modules
    _check_layers(model, "--lora_modules_to_save", settings.lora_modules_to_save, nn.Module)
    if names == [ALL_LINEAR]:
        head, routers = model.get_output_embeddings(), _routers(model)
        named = [k for k, m in layers.items() if isinstance(m, LINEAR) and m is not head and k not in routers]
        chosen = list(weights)
    else:
        names = _found_names(model, names, weights)
        named = [key for key in layers if any(_ends(key, name) for name in names)]
        chosen = [key for key in weights if _parts(key, names)]
    if settings.target_parameters:
        chosen = _check_parameters(model, settings.target_parameters)
    named, chosen = ([key for key in keys if not _is_whole(key, settings)] for keys in (named, chosen))
    misread = _misread_names(model, {key.rpartition(".")[2] for key in named})
    by_weight = [f"{key}.weight" for key in named if key.rpartition(".")[2] in misread]
    if not (weights or chosen or by_weight):
        return Targets(names, [])
    _check_settings(model, settings, chosen, by_weight)
    return Targets([key for key in named if key.rpartition(".")[2] not in misread], chosen + by_weight)


def stacked_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that hold a layer's experts one after the other, by their names without an adapter's."""
    ids = {id(parameter) for bank in expert_banks(model) for parameter in bank.parameters}
    named = [(plain_name(key), p) for key, p in model.named_parameters() if id(p) in ids]
    return {key: parameter for key, parameter in named if len(unsharded_shape(parameter)) == 3}


def describe_targets(adapted: peft.PeftModel) -> str:
    """Say which layers and experts an adapter changes, and which experts it leaves frozen."""
    base = adapted.get_base_model()
    weights, layers, changed = stacked_weights(base), Counter[str](), set[str]()
    for key, module in base.named_modules():
        if isinstance(module, ParamWrapper) and f"{plain_name(key)}.{module.parameter_name}" in weights:
            changed.add(f"{plain_name(key)}.{module.parameter_name}")
        elif isinstance(module, BaseTunerLayer):
            layers[plain_name(key).rpartition(".")[2]] += 1
    parts = [", ".join(f"{count} {name}" for name, count in sorted(layers.items()))] if layers else []
    if changed:
        total, part = (sum(unsharded_shape(weights[k]).numel() for k in keys) for keys in (weights, changed))
        parts.append(f"{part} of the {total} parameters of experts ({_counted(changed)})")
    frozen = weights.keys() - changed
    if frozen:
        ends = " ".join(sorted({_end(key) for key in frozen}))
        parts.append(f"experts stay frozen ({_counted(frozen)}): --target_parameters {ends} would train them")
    return "; ".join(parts)


def plain_name(key: str) -> str:
    """Return a name as it is in the model without an adapter."""
    return key.replace(".base_layer", "")


def _counted(keys: Any) -> str:
    counts = Counter(_end(key) for key in keys)
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))


def _end(key: str) -> str:
    """Return what follows a layer's number."""
    return re.split(r"\.\d+\.", key)[-1]


def _ends(key: str, name: str) -> bool:
    return f".{key}".endswith(f".{name}")


def _parts(key: str, names: list[str]) -> tuple[str, ...]:
    """Return what names are of in an experts' parameter: itself, or all the layers that it was made of, or nothing."""
    place, _, last = key.removesuffix(".weight").rpartition(".")
    made_of = [tuple(f"{place}.{part}" for part in parts) for parts in FORMER_NAMES.get(last, ())]
    for parts in ((key,), (f"{place}.{last}",), *made_of):
        if all(any(_ends(part, name) for name in names) for part in parts):
            return parts
    return ()


def _is_whole(key: str, settings: LoraConfig) -> bool:
    """Whether --lora_modules_to_save trains it whole."""
    return any(f".{name}." in f".{key}." for name in settings.lora_modules_to_save)


def _routers(model: nn.Module) -> set[str]:
    """Return the layers that choose or weigh the experts of a block."""
    blocks = {key.removesuffix(".weight").rpartition(".")[0] for key in stacked_weights(model)}
    blocks = {block.removesuffix(".experts") for block in blocks}
    blocks |= {key.rpartition(".")[0] for key, m in model.named_modules() if key.endswith(".experts")}
    found = set()
    for block in blocks:
        for key, _ in model.get_submodule(block).named_modules():
            if any(ROUTER.fullmatch(part) for part in key.split(".")):
                found.add(f"{block}.{key}")
    return found


def _parameters_beside_layers(model: nn.Module) -> list[str]:
    """Return the names of the matrices, and of the stacks of matrices, that are no layer of their own."""
    found = []
    for key, module in model.named_modules():
        if key and not isinstance(module, (*ADAPTABLE, *CONVOLUTIONS)):
            own = [(name, len(unsharded_shape(p))) for name, p in module.named_parameters(recurse=False)]
            found += [f"{key}.{name}" for name, dims in own if dims in (2, 3) and not name.endswith("bias")]
    return found


def _misread_names(model: PreTrainedModel, last_names: set[str]) -> set[str]:
    """Return which of these last parts of layers' names peft takes for something else in this model."""
    misread = set()
    for name in last_names:
        known = peft.LoraConfig(target_modules=[name])
        try:
            convert_peft_config_for_transformers(known, model, None)
        except ValueError:  # for a part of a parameter without the other one
            misread.add(name)
            continue
        if name not in set(known.target_modules or ()):
            misread.add(name)
    return misread


def _found_names(model: PreTrainedModel, names: list[str], weights: dict[str, nn.Parameter]) -> list[str]:
    """Return the names in --target_modules that the model has; warn of usual ones that it has not."""
    of_weights = {name for key in weights for part in _parts(key, names) for name in names if _ends(part, name)}
    keys = [key for key, _ in model.named_modules()]
    found = [name for name in names if name in of_weights or any(_ends(key, name) for key in keys)]
    missing = [name for name in names if name not in found]
    if not found or not USUAL_NAMES.issuperset(missing):
        _check_layers(model, "--target_modules", missing, ADAPTABLE)
    of_layers = [name for name in found if name not in of_weights or any(_ends(key, name) for key in keys)]
    _check_layers(model, "--target_modules", of_layers, ADAPTABLE)
    if missing:
        named = [key for key, module in model.named_modules() if isinstance(module, ADAPTABLE)]
        log.warning(
            "warning: --target_modules: %s has no %s; the adapter is on the others. There are: %s.",
            type(model).__name__,
            ", ".join(missing),
            ", ".join(sorted({key.rpartition(".")[2] for key in (*named, *weights)})),
        )
    return found


def _check_layers(model: PreTrainedModel, flag: str, names: list[str], kinds: Any) -> None:
    """Raise where a name is the end of no module's name, or of a module that cannot serve."""
    named = [(key, module) for key, module in model.named_modules() if key]
    fitting = [(key, m) for key, m in named if isinstance(m, kinds) and not any(True for _ in m.children())]
    for name in names:
        found = [m for key, m in named if _ends(key, name)]
        if not found or len(found) > sum(_ends(key, name) for key, _ in fitting):
            got = f"a {type(found[0]).__name__}" if found else "no module of that name"
            ends = sorted({key.rpartition(".")[2] for key, _ in fitting})
            raise ConfigError(
                f"{flag}: must name layers of {type(model).__name__}; got {name!r}, {got}. There are: "
                f"{', '.join(ends)}."
            )


def _check_parameters(model: PreTrainedModel, names: list[str]) -> list[str]:
    """Return the parameters that names are of; raise where there is none."""
    there = _parameters_beside_layers(model)
    for name in names:
        if not any(_ends(key, name) for key in there):
            ends = sorted({_end(key) for key in there})
            raise ConfigError(
                f"--target_parameters: must name parameters of {type(model).__name__} such as experts' weights, which "
                f"are in no layer; got {name!r}, none of that name. "
                + (f"There are: {', '.join(ends)}." if ends else "It has none: leave it out.")
            )
    return [key for key in there if any(_ends(key, name) for name in names)]


def _check_settings(model: PreTrainedModel, settings: LoraConfig, chosen: list[str], by_weight: list[str]) -> None:
    """Raise where a parameter is adapted as a whole and the settings are of a layer's input or output."""
    if not (chosen or by_weight):
        return
    what = "experts" if chosen else f"{_end(by_weight[0]).removesuffix('.weight')} of {type(model).__name__}"
    for flag, value in (("--lora_dropout", settings.lora_dropout), ("--use_dora", settings.use_dora)):
        if value:
            raise ConfigError(
                f"{flag}: cannot go with an adapter on {what}, where peft changes the weights themselves; got {value}. "
                "Leave it out, or name other modules in --target_modules, such as q_proj k_proj v_proj o_proj."
            )
    packed = [key for key in (*chosen, *by_weight) if not model.get_parameter(key).is_floating_point()]
    if packed:
        raise ConfigError(
            f"--load_in_4bit: cannot go with an adapter on {_end(packed[0])}, whose weight peft changes itself; got it "
            "in 4 bits. Leave it out, or name other modules in --target_modules."
        )
