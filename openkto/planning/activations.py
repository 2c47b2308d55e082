"""What a model holds while it runs, counted from its own code on the meta device.

The meta device has shapes and no data, so an `Actor` runs in no time, and each tensor that it makes is counted while it
lives. Nothing is known here of any kind of model: checkpointing, adapters, experts and the head count as they run.
Attention is counted as flash-attention, which keeps its inputs, its result and a number for each token and head.

Units:   bytes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from openkto.models.actor import Actor
from openkto.models.live_tensors import LiveTensors
from openkto.models.log_probs import CHUNK_ELEMENTS
from openkto.models.recompute import recompute_activations

Device = Literal["cpu", "cuda"]
Recomputation = Literal["none", "selective", "whole"]
RECOMPUTATION: tuple[Recomputation, ...] = ("none", "selective", "whole")
COUNTED = "openkto_counted"
PHASES = ("forward", "head", "backward", "end")
LAYERS = (1, 2)  # of a model whose layers are all alike, as many are run; the others follow from the difference


@dataclass(frozen=True)
class Shape:
    """A micro-batch: rows of a length, padding among them, and how many of their tokens are scored."""

    rows: int
    length: int
    scored: int


@dataclass(frozen=True)
class Activations:
    """What a forward and a backward take beside the weights and their summed gradients.

    Args:
        kept: what the body's forward keeps for the backward.
        layers: the most beyond that while the layers run, forward or backward.
        head: likewise while the head does.
        end: the most, in all, when the layers have their gradients and the embeddings get theirs.
    """

    kept: float
    layers: float
    head: float
    end: float

    @property
    def peak(self) -> float:
        """The most at any time."""
        return max(self.kept + max(self.layers, self.head), self.end)


def count_training(actor: Actor, shape: Shape, recomputation: Recomputation, device: Device) -> Activations:
    """Return what a micro-batch takes with gradient.

    Args:
        actor: on the meta device, without recomputation.
        device: where it will run, by which attention and the head's chunks are laid out.
    """
    with _counting(actor, device), _recomputing(actor, recomputation):
        return _over_layers(actor, shape, trains=True)


def count_forward(actor: Actor, shape: Shape, device: Device) -> Activations:
    """Return what a micro-batch takes without gradient."""
    with _counting(actor, device):
        return _over_layers(actor, shape, trains=False)


def _over_layers(actor: Actor, shape: Shape, *, trains: bool) -> Activations:
    layers = _like_layers(actor)
    if layers is None:
        return _run(actor, shape, trains=trains)
    everything, found = list(layers), []
    try:
        for count in LAYERS:
            del layers[:]
            layers.extend(everything[:count])
            found.append(_run(actor, shape, trains=trains))
    finally:
        del layers[:]
        layers.extend(everything)
    # What passes is the same beside however many layers' kept tensors.
    few, more = found
    return Activations(
        more.kept + (len(everything) - LAYERS[1]) * (more.kept - few.kept), more.layers, more.head, more.end
    )


def _like_layers(actor: Actor) -> nn.ModuleList | None:
    """Return the model's list of layers, if they are all of one kind and more than need be run."""
    lists = [module for module in actor.body.modules() if isinstance(module, nn.ModuleList)]
    longest = max(lists, key=len, default=None)
    if longest is None or len(longest) <= LAYERS[1]:
        return None
    kinds = {str([(name, tuple(p.shape)) for name, p in layer.named_parameters()]) for layer in longest}
    types = set(actor.language_model.config.get_text_config().to_dict().get("layer_types") or ())
    return longest if len(kinds) == 1 and len(types) <= 1 else None


def _run(actor: Actor, shape: Shape, *, trains: bool) -> Activations:
    parameters = list(actor.parameters())
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter) if trains and parameter.requires_grad else None
    before = [*parameters, *(p.grad for p in parameters if p.grad is not None), *actor.buffers()]
    live = LiveTensors(before)
    actor.train(trains)
    with torch.device("meta"):
        ids_BT = torch.zeros(shape.rows, shape.length, dtype=torch.long)
        mask_BT = torch.ones_like(ids_BT)
        token_P = torch.zeros(ids_BT.numel(), dtype=torch.long)
        scored_K = torch.zeros(shape.scored, dtype=torch.long)
    with _phases(actor, live), live, torch.set_grad_enabled(trains):
        output = actor(ids_BT, mask_BT, mask_BT.bool(), token_P, scored_K)
        if trains:
            output.log_prob_B.sum().backward()
    live.end_phase(next(name for name in PHASES if name not in live.peaks))
    for parameter in parameters:
        parameter.grad = None
    forward, head, backward, end = (live.peaks.get(name, 0) for name in PHASES)
    kept = live.kept
    return Activations(kept, max(forward, backward) - kept, head - kept, end)


@contextmanager
def _phases(actor: Actor, live: LiveTensors) -> Iterator[None]:
    """Inside, the phases of a run end where the body and the embeddings hand on their results and gradients."""

    def body_is_done(_: nn.Module, __: Any, outputs: Any) -> None:
        live.end_phase("forward")
        live.kept = live.bytes
        hidden = outputs.last_hidden_state
        if hidden.requires_grad:
            hidden.register_hook(lambda _: live.end_phase("head"))

    def is_embedded(_: nn.Module, __: Any, embedded: Tensor) -> None:
        if embedded.requires_grad and not embedded.is_leaf:
            embedded.register_hook(lambda _: live.end_phase("backward"))

    hooks = [
        actor.body.register_forward_hook(body_is_done),
        actor.language_model.get_input_embeddings().register_forward_hook(is_embedded),
    ]
    yield
    for hook in hooks:
        hook.remove()


@contextmanager
def _recomputing(actor: Actor, recomputation: Recomputation) -> Iterator[None]:
    if recomputation == "none":
        yield
        return
    recompute_activations(actor.language_model, selective=recomputation == "selective")
    yield
    actor.language_model.gradient_checkpointing_disable()


@contextmanager
def _counting(actor: Actor, device: Device) -> Iterator[None]:
    """Inside, attention is counted as a flash kernel's and the head's chunks are the device's.

    A model that takes no other attention runs its own, as does one whose attention is the plain one with all scores.
    """
    model = actor.language_model
    before = model.config._attn_implementation
    CHUNK_ELEMENTS["meta"] = CHUNK_ELEMENTS[device]
    if model._supports_attention_backend and before != "eager":
        AttentionInterface.register(COUNTED, _attention_on_cpu if device == "cpu" else _attention)
        model.set_attn_implementation(COUNTED)
    try:
        yield
    finally:
        del CHUNK_ELEMENTS["meta"]
        model.set_attn_implementation(before)


def _attention(_: nn.Module, query: Tensor, key: Tensor, value: Tensor, *__: Any, **___: Any) -> Any:
    """Attention in one kernel; the name of a processor's has the shapes of all, and checkpointing knows it."""
    out, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value)
    return out.transpose(1, 2), None


def _attention_on_cpu(_: nn.Module, query: Tensor, key: Tensor, value: Tensor, *__: Any, **___: Any) -> Any:
    """Attention row by row, whose results are put together; see `packed_attention`."""
    lines = (heads.transpose(1, 2).flatten(0, 1) for heads in (query, key, value))
    rows = (line.split([len(line)])[0].transpose(0, 1)[None] for line in lines)
    out, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*rows)
    batch, length = query.shape[0], query.shape[2]
    return torch.cat([out[0].transpose(0, 1)]).reshape(batch, length, *out.shape[1::2]), None
