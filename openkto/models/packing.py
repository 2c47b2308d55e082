"""Rows without padding: a micro-batch as one long row, and which models can run it.

The rows of a padded micro-batch are laid end to end, positions begin at 0 in each, and attention is told where each
one begins. transformers hands these bounds from the model's forward to whatever attention function it runs:
flash-attention's own, flex_attention's, or the one of `packed_attention.py`.

Shapes:  B = rows, T = the longest, P = tokens of all rows together.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from openkto.config import PackingChoice
from openkto.errors import ConfigError
from openkto.models.packed_attention import PACKED, Sharers

# The implementations that keep packed rows apart; others attend over a whole square with a mask, or across rows.
PACKING_ATTENTION = (PACKED, "flash_attention_2", "flash_attention_3", "flex_attention")


# What layers may be, where their configuration says so: a state that runs on from token to token knows no rows.
SEPARABLE_LAYERS = {"full_attention", "sliding_attention"}
# The kinds of model whose layers take the rows' bounds and do not hand them on to attention.
DROPS_BOUNDS = {"nemotron"}


def start_packing(model: PreTrainedModel, packing: PackingChoice, attn_implementation: str) -> bool:
    """Give the model an attention that keeps packed rows apart, and return whether it has one.

    Args:
        attn_implementation: as it was asked for; `auto` leaves the choice to this function.

    Raises:
        ConfigError: packing is to be on, and the model or the attention asked for cannot.
    """
    if packing == "off":
        return False
    reason = _reason_against(model, attn_implementation)
    if reason is None:
        if model.config._attn_implementation not in PACKING_ATTENTION:
            model.set_attn_implementation(_own_choice())
        return True
    if packing == "on":
        raise ConfigError(f"--packing: on needs attention that keeps packed rows apart; got {reason}. Take auto.")
    return False


def _reason_against(model: PreTrainedModel, attn_implementation: str) -> str | None:
    text = model.config.get_text_config()
    known = text.to_dict()
    if attn_implementation not in ("auto", *PACKING_ATTENTION):
        return f"--attn_implementation {attn_implementation}"
    others = set(layer_kinds(text)) - SEPARABLE_LAYERS
    if others or known.get("attention_chunk_size"):
        return f"{type(model).__name__} with layers of {', '.join(sorted(others)) or 'chunked attention'}"
    if not (model._supports_attention_backend and model._supports_flash_attn):
        return f"{type(model).__name__}, whose attention takes no other implementation"
    if text.model_type in DROPS_BOUNDS:
        return f"{type(model).__name__}, whose layers do not hand on where rows begin"
    has_sinks = any(name.endswith("sinks") for name, _ in model.named_parameters())
    has_caps = known.get("attn_logit_softcapping") is not None or has_sinks
    if has_caps and model.config._attn_implementation not in PACKING_ATTENTION:
        return f"{type(model).__name__}, whose scores are capped or have sinks, without flash-attention"
    return None


def layer_kinds(text: PretrainedConfig) -> list[str]:
    """Return the kind of each layer where a text model's configuration says it, else nothing.

    By attribute: some configurations have it under another name, which leads to the first one; RecurrentGemma's does
    so from transformers 5.23 on.
    """
    for name in ("layer_types", "layers_block_type"):
        if hasattr(text, name) and getattr(text, name):
            return list(getattr(text, name))
    return []


def _own_choice() -> str:
    """Return the best that needs no further package: PyTorch's kernel is for GPUs of 2020 (Ampere) and later."""
    is_old_gpu = torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0)
    return "flex_attention" if is_old_gpu else PACKED


class Packed(NamedTuple):
    """A micro-batch as one row; the last two only where that has the prompt of several rows once."""

    input_ids: Tensor  # [1, P]
    position_ids: Tensor  # [1, P], from 0 in each row
    bounds: Tensor  # [B + 1] int32: row b is tokens bounds[b] to bounds[b + 1]
    longest: int
    place_index: Tensor | None = None  # [A]: of each token of the whole rows its place among those that run
    query_bounds: Tensor | None = None  # [B + 1] int32: what runs of row b is tokens query_bounds[b] to [b + 1]

    def for_model(self) -> dict[str, Any]:
        """Return the keyword arguments of a transformers model; those of bounds are its flash attention's."""
        inputs = {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            "cu_seq_lens_q": self.bounds,
            "cu_seq_lens_k": self.bounds,
            "max_length_q": self.longest,
            "max_length_k": self.longest,
        }
        if self.place_index is not None:
            inputs |= {"cu_seq_lens_q": self.query_bounds, "key_index": self.place_index}
        return inputs


def pack(
    input_ids: Tensor,
    attention_mask: Tensor,
    token_index: Tensor,
    place_index: Tensor | None = None,
    query_bounds: Tensor | None = None,
) -> Packed:
    """Lay the rows end to end; nothing here makes a GPU's host wait.

    Args:
        input_ids: [B, T], padded on the right.
        attention_mask: [B, T], 1 on tokens, 0 on padding.
        token_index: [P], where the tokens that run stand in the flattened rows.
        place_index, query_bounds: see `Packed`, where the prompts of some rows run in another row.
    """
    longest = input_ids.shape[1]
    bounds = F.pad(attention_mask.sum(1).cumsum(0), (1, 0)).int()
    ids_P = input_ids.flatten().index_select(0, token_index)
    return Packed(ids_P[None], (token_index % longest)[None], bounds, longest, place_index, query_bounds)


def predictors(attention_mask: Tensor, scored_index: Tensor, place_index: Tensor | None = None) -> Tensor:
    """Return where the tokens stand in the packed row that predict the scored ones, [K]: those before them."""
    before_K = attention_mask.flatten().cumsum(0).index_select(0, scored_index) - 2
    return before_K if place_index is None else place_index.index_select(0, before_K)


def own_slice(packed: Packed, sharers: Sharers) -> Packed:
    """Return this rank's slice of the row, made a multiple of the ranks by a further row, with the whole's bounds."""
    ids, positions, bounds, longest, place_index, _ = packed
    assert place_index is None, "ranks that share tokens get rows whose prompts are their own"
    extra = -ids.shape[1] % sharers.size
    if extra:
        ids = F.pad(ids, (0, extra))
        positions = torch.cat([positions, torch.arange(extra, device=ids.device)[None]], dim=1)
        bounds, longest = torch.cat([bounds, bounds[-1:] + extra]), max(longest, extra)
    own_ids, own_positions = (whole.chunk(sharers.size, dim=1)[sharers.rank] for whole in (ids, positions))
    return Packed(own_ids, own_positions, bounds, longest)
