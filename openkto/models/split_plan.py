"""Which layers are cut, and how, when several ranks share a model's weights (tensor parallelism).

transformers keeps a plan with each architecture (`base_model_tp_plan`): a layer cut by columns gives each rank some of
its outputs, one cut by rows takes those in and its outputs are summed. What the plan does not name stays whole on
every rank; so do the embeddings and the head, whose log-probabilities are computed from the whole weight.
"""

import re
from typing import Any, Literal

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from openkto.errors import ConfigError

# summed: whole on every rank, which sees only a part of the activations, so that the gradients add up.
Style = Literal["columns", "rows", "summed"]
STYLES: dict[str, Style] = {"colwise": "columns", "rowwise": "rows", "replicated_with_grad_allreduce": "summed"}
# Of the embeddings, which are not cut here.
LEFT_WHOLE = ("embedding_rowwise", "embedding_colwise")
FLAG = "--tensor_parallel_size"


def check_heads(config: Any, size: int, flag: str, *, repeats_keys: bool = False) -> None:
    """Compare a model's attention heads with the number of ranks that they are dealt to.

    Args:
        config: of the model.
        flag: the setting that says how many.
        repeats_keys: whether ranks may have the same key-value head, where there are fewer heads than ranks.

    Raises:
        ConfigError: they cannot be dealt evenly.
    """
    if size == 1:
        return
    known = config.get_text_config().to_dict()
    heads = known.get("num_attention_heads")
    if heads is None:
        raise ConfigError(f"{flag}: needs a model with attention heads; got {config.model_type}. Leave it out.")
    keys = known.get("num_key_value_heads") or heads
    for name, number in (("attention", heads), ("key-value", keys)):
        if number % size and not (name == "key-value" and repeats_keys and size % number == 0):
            raise ConfigError(
                f"{flag}: must divide the model's {number} {name} heads; got {size}. Take a number that does."
            )


def check_split(config: Any, size: int) -> None:
    """See that a model's weights can be cut for this many ranks, from its configuration only.

    Raises:
        ConfigError: they cannot.
    """
    if size == 1:
        return
    plan = _plan_of(config)
    others = sorted({style for style in plan.values() if style not in (*STYLES, *LEFT_WHOLE)})
    if others or not plan:
        got = f"{config.model_type}, {'with ' + ', '.join(others) if others else 'which has none'}"
        raise ConfigError(
            f"{FLAG}: needs a model whose tensor-parallel plan in transformers is of plain columns and rows; got "
            f"{got}. Leave it out, and take --zero_stage 3."
        )
    check_heads(config, size, FLAG)


def split_plan(model: nn.Module, config: Any, size: int) -> dict[str, Style]:
    """Return how each layer that is cut is, by its name in `model`, and those of an adapter on it.

    An adapter follows its layer: of one cut by columns B is, of one cut by rows A is.

    Args:
        config: of the model.

    Raises:
        ConfigError: the model or its adapter cannot be cut so.
    """
    check_split(config, size)
    patterns = [
        (re.compile(r"(?:.*\.)?" + re.escape(pattern).replace(r"\*", r"\d+")), STYLES[style])
        for pattern, style in _plan_of(config).items()
        if style in STYLES
    ]
    found: dict[str, Style] = {}
    for name, module in model.named_modules():
        for pattern, style in patterns:
            if pattern.fullmatch(name):
                found |= _layers(name, module, style)
    for name, style in found.items():
        _check_width(name, model.get_submodule(name), style, size)
    return found


def _check_width(name: str, layer: Any, style: Style, size: int) -> None:
    if style == "summed":
        return
    width = layer.out_features if style == "columns" else layer.in_features
    if width % size:
        raise ConfigError(
            f"{FLAG}: must divide the width of every layer that is cut; got {size}, and {width} in {name}. Take a "
            "number that does."
        )


def _plan_of(config: Any) -> dict[str, str]:
    text = config.get_text_config()
    return dict(text.base_model_tp_plan or {})


def _layers(name: str, module: Any, style: Style) -> dict[str, Style]:
    """Return the layers to cut of a planned one, and how."""
    if style == "summed" or type(module) is nn.Linear:
        return {name: style}
    is_plain = isinstance(module, BaseTunerLayer) and type(module.get_base_layer()) is nn.Linear
    if not is_plain or any(module.use_dora.values()):
        got = f"{type(module).__name__} in {name}"
        raise ConfigError(f"{FLAG}: cuts linear layers, plain or with plain LoRA; got {got}. Leave one of the two out.")
    found: dict[str, Style] = {f"{name}.base_layer": style}
    part = "lora_B" if style == "columns" else "lora_A"
    return found | {f"{name}.{part}.{adapter}": style for adapter in getattr(module, part)}
