"""An adapter added to its base model's weights, as a whole model that needs no peft.

Shapes:  B, T = rows and tokens of the short forward that tells two models apart, V = vocabulary.
"""

from collections import Counter
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig, PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from openkto.errors import ConfigError
from openkto.models.adapter import TRAINED, load_adapter, quiet_peft
from openkto.models.export import check_space, export_model
from openkto.models.loading import DTYPES, load_config, load_model

# Nats: float32's round-off in a deep model's logits; a head or an expert that is not the trained one is far above it.
TOLERANCE = 1e-3
ROWS, TOKENS = 4, 32


def merge_adapter(
    pretrain: str, tokenizer: Any, folder: str | Path, export_dtype: str | None, *, trust_remote_code: bool = False
) -> None:
    """Write the base model of an adapter's folder with the adapter's weights added to its own.

    The sum is made in float32 and rounded once. A layer that shares its weight with one that the adapter does not
    change shares it no longer. What was written is read again and compared before it takes its place.

    Args:
        folder: there already.
        export_dtype: of the weights; None is the base model's own.

    Raises:
        ConfigError: the adapter or its base model cannot be loaded, there is too little space, or the merged model
            would compute something else.
        OpenKTOError: the folder cannot be written.
    """
    own: Any = load_config(pretrain, trust_remote_code).dtype or torch.float32
    dtype: torch.dtype = DTYPES[export_dtype] if export_dtype else own
    model = load_model(pretrain, dtype=torch.float32, trust_remote_code=trust_remote_code)
    check_space(folder, model.num_parameters(), dtype)
    if Path(pretrain, "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(pretrain)
    adapted = load_adapter(model, pretrain)
    ids_BT = _ids_to_try(adapted)
    trained_BTV = _log_probs(adapted, ids_BT)
    part_shared_weights(adapted)
    with quiet_peft():
        whole: Any = adapted.merge_and_unload(safe_merge=True)
    if whole.get_input_embeddings().weight is not whole.get_output_embeddings().weight:
        whole.config.tie_word_embeddings = whole.config.get_text_config().tie_word_embeddings = False
    _check_distance(pretrain, "in memory", trained_BTV, _log_probs(whole, ids_BT))
    weights = whole.state_dict()  # not whole.to(dtype): rotary frequencies are in no file, and stay as they are
    rounded = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in weights.items()}
    whole.load_state_dict(rounded)
    rounded_BTV = _log_probs(whole, ids_BT)

    def check(scratch: Path) -> None:
        written = load_model(str(scratch), dtype=torch.float32, trust_remote_code=trust_remote_code)
        _check_distance(pretrain, "as it was written", rounded_BTV, _log_probs(written, ids_BT))

    export_model(whole, rounded, tokenizer, folder, dtype, {}, check=check)


def part_shared_weights(adapted: PeftModel) -> None:
    """Give every layer with LoRA weights of its own where another module has the same ones: the head, as a rule."""
    users = Counter(id(p) for module in adapted.modules() for p in module.parameters(recurse=False))
    for layer in adapted.modules():
        if isinstance(layer, BaseTunerLayer):
            base: nn.Module = layer.get_base_layer()
            for name, parameter in list(base.named_parameters(recurse=False)):
                if users[id(parameter)] > 1:
                    setattr(base, name, nn.Parameter(parameter.detach().clone(), requires_grad=False))


def _ids_to_try(adapted: PeftModel) -> Tensor:
    """Return rows of ids over the whole vocabulary, every other one a token that the adapter trains by itself, [B, T].

    What only changes few tokens would be missed otherwise.
    """
    base, settings = cast(PreTrainedModel, adapted.get_base_model()), cast(LoraConfig, adapted.peft_config[TRAINED])
    ids = torch.arange(ROWS * TOKENS) * 7919 % base.config.get_text_config().vocab_size
    trained = settings.trainable_token_indices or []
    tokens = sorted({i for of_layer in trained.values() for i in of_layer} if isinstance(trained, dict) else trained)
    if tokens:
        ids[::2] = torch.tensor(tokens).repeat(len(ids))[: len(ids[::2])]
    return ids.view(ROWS, TOKENS)


@torch.no_grad()
def _log_probs(model: PreTrainedModel | PeftModel, ids_BT: Tensor) -> Tensor:
    """Return the model's log-probabilities of every next token, [B, T, V] float32."""
    return model.eval()(input_ids=ids_BT, use_cache=False).logits.float().log_softmax(-1)


def _check_distance(pretrain: str, when: str, expected_BTV: Tensor, got_BTV: Tensor) -> None:
    """Raise ConfigError where two models are apart.

    The mean over tokens of the largest difference: a router's near tie may fall otherwise for a token or two.
    """
    apart = float((expected_BTV - got_BTV).abs().amax(-1).mean())
    if not apart <= TOLERANCE:
        raise ConfigError(
            f"{pretrain}: the merged model must compute the same as base model and adapter; got {apart:.3g} nats "
            f"between their log-probabilities, {when}. Use the adapter with its base model, or another --export_dtype "
            "if this one overflows."
        )
