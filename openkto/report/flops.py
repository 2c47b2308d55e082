"""The useful work of a step in FLOPs: what must be computed, whatever the hardware and the batching.

Counted are the products of matrices: the linear layers on real tokens, attention on the pairs of a token with itself
and what is before it, and the head on the positions that predict a scored token. Not counted: padding, recomputation,
the other half of attention's square, and what is no product.

Shapes:  B = rows in a micro-batch.
Units:   FLOPs; a multiplication with its addition is two.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from openkto.batches.loader import RankBatch
from openkto.batches.micro_batch import MicroBatch
from openkto.distributed.gather import whole_shape
from openkto.models.experts import expert_banks
from openkto.models.packing import layer_kinds

# Parameters of several dimensions that are added, or multiplied element by element.
ADDED = re.compile(r"\w*_bias|A_log|time_mix_\w+")
# Of the layers whose work is attention's, by their names in configurations: the setting of how many tokens one sees,
# if it does not see all.
SEEN_BY = {
    "full_attention": None,
    "attention": None,
    "hybrid": None,
    "sliding_attention": "sliding_window",
    "hybrid_sliding": "sliding_window",
    "chunked_attention": "attention_chunk_size",
    "indexed_attention": "index_topk",
}


@dataclass(frozen=True)
class ForwardWork:
    """What a model's forward multiplies.

    Args:
        body: the weights of linear layers that a token meets.
        head: those of the head.
        trainable_body, trainable_head: of them, those whose gradient is computed.
        attention: for each kind of attention layer, (its window in tokens or None, heads times the mean of a query's
            and a value's size, over all layers of the kind).
    """

    body: float
    head: float
    trainable_body: float
    trainable_head: float
    attention: tuple[tuple[int | None, float], ...]

    @property
    def attention_length(self) -> float:
        """The tokens of a row whose attention multiplies as much as the linear layers of the body do."""
        whole = sum(size for window, size in self.attention if window is None)
        return self.body / whole if whole else math.inf

    def forward(self, lengths_B: Tensor, scored: int, reused_B: Tensor | None = None) -> float:
        """Return the work of a forward on rows of these lengths, of whose tokens this many are scored.

        Args:
            reused_B: [B], how many of each row's first tokens run in another row.
        """
        whole = 2 * (self.body * int(lengths_B.sum()) + self.head * scored) + self._attention(lengths_B)
        return whole if reused_B is None else whole - self.forward(reused_B, 0)

    def training(self, lengths_B: Tensor, scored: int, reused_B: Tensor | None = None) -> float:
        """Return the work of a forward, of which see the arguments, and its backward.

        The backward pass goes once more through each weight, and once more for the gradient of each that trains; of
        attention's two products each gives two.
        """
        own = 2 * (self.trainable_body * int(lengths_B.sum()) + self.trainable_head * scored)
        whole = 2 * self.forward(lengths_B, scored) + self._attention(lengths_B) + own
        return whole if reused_B is None else whole - self.training(reused_B, 0)

    def head_again(self, scored: int) -> float:
        """Return the work of the head's forward, which a backward computes again to keep no logits: not useful."""
        return 2 * self.head * scored

    def _attention(self, lengths_B: Tensor) -> float:
        # Scores and values: two products for each pair of tokens.
        return sum(2 * 2 * size * attended_pairs(lengths_B, window) for window, size in self.attention)


class StepParts(NamedTuple):
    """The FLOPs of a step's parts."""

    matched: float  # the policy's forward and backward on the rows
    mismatched: float  # its forward without gradient on the mismatched pairs
    reference: float


@dataclass(frozen=True)
class StepWork:
    """The work of a step on this rank: training on the matched rows, the policy on the mismatched, the reference.

    Args:
        policy: the model that trains.
        reference: the model that the step's forwards of the reference go through, or None where these are cached.
    """

    policy: ForwardWork
    reference: ForwardWork | None

    def of(self, batch: RankBatch) -> float:
        """Return the FLOPs that this share of a global batch needs."""
        return sum(self.parts(batch))

    def parts(self, batch: RankBatch) -> StepParts:
        """Return the same by part."""
        matched, mismatched, shared = (
            list(row_sizes(micro_batches, prefix))
            for micro_batches, prefix in ((batch.matched, ""), (batch.mismatched, "kl_"), (batch.shared, ""))
        )
        of_policy = list(row_sizes(batch.mismatched, "kl_", "rest_bounds")) if batch.reuses_prompts else mismatched
        reference = 0.0
        if self.reference is not None:
            reference = sum(self.reference.forward(*sizes) for sizes in shared or [*matched, *mismatched])
        return StepParts(
            matched=sum(self.policy.training(*sizes) for sizes in matched),
            mismatched=sum(self.policy.forward(*sizes) for sizes in of_policy),
            reference=reference,
        )


def row_sizes(
    micro_batches: list[MicroBatch], prefix: str, of_bounds: str = "query_bounds"
) -> Iterator[tuple[Tensor, int, Tensor]]:
    """Yield of each micro-batch its real rows' lengths, the number of scored tokens, and what each row reuses."""
    for micro_batch in micro_batches:
        lengths_B, scored_BT = micro_batch[f"{prefix}attention_mask"].sum(1), micro_batch[f"{prefix}loss_mask"]
        reused_B, bounds = torch.zeros_like(lengths_B), micro_batch.get(f"{prefix}{of_bounds}")
        if bounds is not None:
            reused_B = lengths_B - bounds.diff()
        real_B = scored_BT.any(1)
        yield lengths_B[real_B], int(scored_BT.sum()), reused_B[real_B]


def step_work(actor: Any, ref_model: Any) -> StepWork:
    """Return the work of a step of this `Actor`.

    Args:
        ref_model: as `KTOTrainer` takes it: a model or engine; a cache, which costs no forward; or None for the policy
            with its adapter off.
    """
    if ref_model is None:
        return StepWork(forward_work(actor), forward_work(actor, adapter_off=True))
    inner = actor_in(ref_model)
    return StepWork(forward_work(actor), None if inner is None else forward_work(inner))


def actor_in(ref_model: Any) -> Any:
    """Return the `Actor` that is or is in a reference, or None where that is a cache or the policy's own start."""
    if not isinstance(ref_model, nn.Module):
        return None
    # At ZeRO-3 it is an engine around the model.
    return ref_model if hasattr(ref_model, "language_model") else ref_model.module


def attended_pairs(lengths_B: Tensor, window: int | None) -> int:
    """Return how many (token, token it sees) pairs rows of these lengths have, each token seeing itself."""
    if window is None:
        return int((lengths_B * (lengths_B + 1) // 2).sum())
    inside_B = lengths_B.clamp(max=window)
    return int((inside_B * (inside_B + 1) // 2 + (lengths_B - inside_B) * window).sum())


def forward_work(actor: Any, *, adapter_off: bool = False) -> ForwardWork:
    """Return what a forward of this `Actor` multiplies.

    Args:
        adapter_off: as its own reference, without the adapter's weights.
    """
    model = actor.language_model
    head = model.get_output_embeddings().weight
    banks = expert_banks(model)
    shares = {id(p): bank.per_token / bank.size for bank in banks for p in bank.parameters}
    body = trainable_body = 0.0
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            shape = whole_shape(parameter)
            if len(shape) < 2 or parameter is head or (adapter_off and parameter.requires_grad):
                continue
            if ADDED.fullmatch(name):
                continue
            # Of a layer's experts a token meets some.
            share = shares.get(id(parameter), 1.0)
            body += share * shape.numel()
            trainable_body += share * shape.numel() * parameter.requires_grad
    weights = float(whole_shape(head).numel())
    return ForwardWork(body, weights, trainable_body, weights * head.requires_grad, _attention_layers(model.config))


def _attention_layers(config: Any) -> tuple[tuple[int | None, float], ...]:
    text = config.get_text_config()
    if not hasattr(text, "num_attention_heads"):
        return ()  # a model without attention, such as Mamba
    known = text.to_dict()
    every = "sliding_attention" if known.get("sliding_window") else "full_attention"
    kinds = layer_kinds(text) or [every] * text.num_hidden_layers
    found = []
    for kind in sorted(set(kinds) & set(SEEN_BY)):
        name = SEEN_BY[kind]
        size = text.num_attention_heads * sum(_head_sizes(text, kind)) / 2
        found.append((known.get(name) if name else None, size * kinds.count(kind)))
    return tuple(found)


def _head_sizes(text: Any, kind: str) -> tuple[int, int]:
    """Return the size of a head's query and of its value; they differ in multi-head latent attention."""
    known = text.to_dict()
    if known.get("kv_lora_rank"):
        return known["qk_nope_head_dim"] + known["qk_rope_head_dim"], known["v_head_dim"]
    # Older configurations have their heads under other names, which lead here.
    size = known.get("head_dim") or text.hidden_size // text.num_attention_heads
    if kind == "full_attention":
        size = known.get("global_head_dim") or size
    return size, known.get("v_head_dim") or size
