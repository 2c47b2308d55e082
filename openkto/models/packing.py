"""Rows without padding: a micro-batch as one long row, and the attention that keeps its rows apart.

The rows of a padded micro-batch are laid end to end, positions begin at 0 in each, and attention is told where each
one begins. transformers hands these bounds from the model's forward to whatever attention function it runs:
flash-attention's own, flex_attention's, or `packed_attention` here, which is registered under the name `PACKED`.

Shapes:  B = rows, T = the longest, P = tokens of all rows together, A = attention heads, G = key and value heads,
         D = a head's size.
"""

import inspect
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel

from openkto.config import PackingChoice
from openkto.errors import ConfigError
from openkto.models.kept_keys import KeptKeys

PACKED = "openkto_packed"
# The implementations that keep packed rows apart; others attend over a whole square with a mask, or across rows.
PACKING_ATTENTION = (PACKED, "flash_attention_2", "flash_attention_3", "flex_attention")
# torch 2.11's kernel wants as many key heads as query heads.
GROUPS_HEADS = "enable_gqa" in inspect.signature(varlen_attn).parameters
# What it takes of a head: queries, keys and values of one size, a multiple of 8 and no larger.
LARGEST_HEAD = 256


# What layers may be, where their configuration says so: a state that runs on from token to token knows no rows.
SEPARABLE_LAYERS = {"full_attention", "sliding_attention"}
# The kinds of model whose layers take the rows' bounds and do not hand them on to attention.
DROPS_BOUNDS = {"nemotron"}


class UnknownAttention(ValueError):
    """A model asks more of its attention than the packed one knows."""


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


class Sharers(Protocol):
    """The ranks that share a packed row's tokens; see `openkto/distributed/sequence_parallel.py`."""

    rank: int
    size: int

    def attend(self, attention: Any, *inputs: Any, **others: Any) -> tuple[Tensor, None]: ...

    def total(self, own: Tensor) -> Tensor: ...

    def together(self, own: Tensor) -> Tensor: ...


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


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    key_index: Tensor | None = None,
    kept_keys: KeptKeys | None = None,
    sharers: Sharers | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each row, in the form that transformers calls attention functions.

    PyTorch's variable-length flash kernel in half precision on a GPU; elsewhere scaled_dot_product_attention row by
    row, which is as exact and, on a CPU, as fast.

    Args:
        query: [1, A, P, D] packed; without `cu_seq_lens_q` [B, A, T, D], where each line is a row.
        key, value: [1, G, P, D], likewise.
        scaling: of the scores; None is 1 / sqrt(D).
        sliding_window: how many tokens back, its own included, a token sees.
        cu_seq_lens_q: [B + 1] int32, the rows' bounds.
        cu_seq_lens_k: likewise, of their keys and values, where `key_index` is given.
        key_index: [A], the places of each row's keys and values where it also sees tokens of another row; its own
            tokens are the last of these.
        kept_keys: of a forward before this one or for one after it; they stand behind this one's own.
        max_length_q: the longest row's tokens, or more.
        sharers: the ranks that hold the slices of this row, each its own.
        others: what this kind of model hands to every attention function.

    Returns:
        [1, P, A, D], and no attention weights.

    Raises:
        UnknownAttention: the model caps its scores or has attention sinks, which these kernels do not know.
        ValueError: it generates.
    """
    if softcap is not None or s_aux is not None:
        raise UnknownAttention(f"{PACKED} knows neither soft caps nor attention sinks")
    if sharers is not None:
        return sharers.attend(
            packed_attention,
            module,
            query,
            key,
            value,
            attention_mask,
            scaling=scaling,
            sliding_window=sliding_window,
            cu_seq_lens_q=cu_seq_lens_q,
            max_length_q=max_length_q,
        )
    batch, _, length, _ = query.shape
    if key.shape[2] != length:
        raise ValueError(
            f"{PACKED} runs whole rows; got {length} tokens that look at {key.shape[2]}, as in generation. "
            'Call set_attn_implementation("sdpa") first.'
        )
    device = query.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else value.dtype
    query_PAD, key_PGD, value_PGD = (_one_line(heads).to(dtype) for heads in (query, key, value))
    if cu_seq_lens_q is None:
        cu_seq_lens_q = torch.arange(batch + 1, dtype=torch.int32, device=query.device) * length
        max_length_q = length
    assert max_length_q is not None, "the bounds of packed rows come with the longest one's length"
    bounds = cu_seq_lens_q, cu_seq_lens_q
    if kept_keys is not None:
        key_PGD, value_PGD = kept_keys.attend_to(key_PGD, value_PGD)
    if key_index is not None:
        assert cu_seq_lens_k is not None, "keys of other rows come with their bounds"
        key_PGD, value_PGD = (heads.index_select(0, key_index) for heads in (key_PGD, value_PGD))
        bounds = cu_seq_lens_q, cu_seq_lens_k
    fits = max(query.shape[-1], value.shape[-1]) <= LARGEST_HEAD
    if query.is_cuda and dtype in (torch.bfloat16, torch.float16) and fits:
        out_PAD = _in_one_kernel(query_PAD, key_PGD, value_PGD, bounds, max_length_q, scaling, sliding_window)
    else:
        out_PAD = _row_by_row(query_PAD, key_PGD, value_PGD, bounds, scaling, sliding_window)
    return out_PAD.reshape(batch, length, *out_PAD.shape[1:]), None


def _one_line(heads: Tensor) -> Tensor:
    """Return [B, A, T, D] as [B * T, A, D], without a copy where B is 1."""
    return heads.transpose(1, 2).flatten(0, 1)


def _in_one_kernel(
    query_PAD: Tensor,
    key_PGD: Tensor,
    value_PGD: Tensor,
    bounds: tuple[Tensor, Tensor],
    longest: int,
    scaling: float | None,
    sliding_window: int | None,
) -> Tensor:
    groups = query_PAD.shape[1] // key_PGD.shape[1]
    grouped: dict[str, Any] = {}
    if groups > 1 and GROUPS_HEADS:
        grouped = {"enable_gqa": True}
    elif groups > 1:
        key_PGD, value_PGD = (heads.repeat_interleave(groups, dim=1) for heads in (key_PGD, value_PGD))
    scaling = query_PAD.shape[-1] ** -0.5 if scaling is None else scaling
    value_size = value_PGD.shape[-1]
    size = -(-max(query_PAD.shape[-1], value_size) // 8) * 8
    query_PAD, key_PGD, value_PGD = (_widened(heads, size) for heads in (query_PAD, key_PGD, value_PGD))
    # The kernel counts the tokens before a token's own, and takes a row's queries to be those of its last keys.
    window = (-1 if sliding_window is None else sliding_window - 1, 0)
    out: Any = varlen_attn(
        query_PAD,
        key_PGD,
        value_PGD,
        *bounds,
        longest,
        longest,
        scale=scaling,
        window_size=window,
        **grouped,
    )
    own: Tensor = out[..., :value_size]
    return own


def _widened(heads: Tensor, size: int) -> Tensor:
    """Return the heads with zeros behind, up to the size; they change neither scores nor values."""
    return heads if heads.shape[-1] == size else F.pad(heads, (0, size - heads.shape[-1]))


@torch.compiler.disable  # which would compile it again for every number of rows
def _row_by_row(
    query_PAD: Tensor,
    key_PGD: Tensor,
    value_PGD: Tensor,
    bounds: tuple[Tensor, Tensor],
    scaling: float | None,
    sliding_window: int | None,
) -> Tensor:
    rows = []
    is_grouped = query_PAD.shape[1] != key_PGD.shape[1]
    asking, seen = ([end - start for start, end in pairwise(ends.tolist())] for ends in bounds)
    # Split, since the gradients of slices would each be as long as the whole.
    split = query_PAD.split(asking), key_PGD.split(seen), value_PGD.split(seen)
    for queries, keys, *own in zip(asking, seen, *split, strict=True):
        query, key, value = (heads.transpose(0, 1)[None] for heads in own)
        is_whole = queries == keys and (sliding_window is None or keys <= sliding_window)
        out = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=None if is_whole else _band(queries, keys, sliding_window, query.device),
            is_causal=is_whole,
            scale=scaling,
            enable_gqa=is_grouped,
        )
        rows.append(out[0].transpose(0, 1))
    return torch.cat(rows)


def _band(queries: int, keys: int, sliding_window: int | None, device: torch.device) -> Tensor:
    """Return which of a row's last tokens see which of all of them, [queries, keys]: those of a causal window."""
    seen = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    return seen if sliding_window is None else seen.triu(keys - queries + 1 - sliding_window)


AttentionInterface.register(PACKED, packed_attention)
