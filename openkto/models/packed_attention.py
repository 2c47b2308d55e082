"""Attention that keeps the rows of a packed micro-batch apart, registered in transformers under the name `PACKED`.

Shapes:  B = rows, T = the longest, P = tokens of all rows together, A = attention heads, G = key and value heads,
         D = a head's size.
"""

import inspect
from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from openkto.models.kept_keys import KeptKeys

PACKED = "openkto_packed"
# torch 2.11's kernel wants as many key heads as query heads.
GROUPS_HEADS = "enable_gqa" in inspect.signature(varlen_attn).parameters
# What it takes of a head: queries, keys and values of one size, a multiple of 8 and no larger.
LARGEST_HEAD = 256


class UnknownAttention(ValueError):
    """A model asks more of its attention than the packed one knows."""


class Sharers(Protocol):
    """The ranks that share a packed row's tokens; see `openkto/distributed/sequence_parallel.py`."""

    rank: int
    size: int

    def attend(self, attention: Any, *inputs: Any, **others: Any) -> tuple[Tensor, None]: ...

    def total(self, own: Tensor) -> Tensor: ...

    def together(self, own: Tensor) -> Tensor: ...


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
        key_PGD, value_PGD = (_at(heads, key_index) for heads in (key_PGD, value_PGD))
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


def _at(heads: Tensor, index_A: Tensor) -> Tensor:
    """Return the keys or values at these places, of which some come several times."""
    # On a GPU the gradient of index_select adds up a place's copies in any order, that of brackets in one that stays.
    return heads[index_A] if heads.is_cuda else heads.index_select(0, index_A)


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
