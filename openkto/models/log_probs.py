"""Log-probabilities of given tokens from hidden states, without ever holding the logits of all of them.

The head runs on chunks of tokens; the backward pass runs each chunk's head again instead of keeping it, and turns the
logits into their gradient in place. So the memory is that of one chunk, forward and backward.

Shapes:  K = scored tokens in the micro-batch, C = tokens in a chunk, H = hidden size, V = vocabulary, B = rows,
         T = the longest row.
Units:   nats.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from openkto.models.onednn import linear

# float32 logits held at a time (C x V); small on a CPU, whose caches are, and large enough to fill a GPU.
CHUNK_ELEMENTS = {"cpu": 2**21, "cuda": 2**26}


MULTIPLIES = {"hyperclovax"}  # by its logits_scaling; others divide
IGNORES_SCALE = {"mpt"}  # transformers' MPT does not read its logit_scale


@dataclass(frozen=True)
class LogitMap:
    """What a model does to its head's output: a factor (Cohere, Granite), then a soft cap (Gemma, xLSTM)."""

    scale: float = 1.0
    softcap: float | None = None

    def apply_(self, logits_CV: Tensor) -> Tensor:
        """Map the head's output in place."""
        if self.scale != 1.0:
            logits_CV.mul_(self.scale)
        if self.softcap is not None:
            logits_CV.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits_CV

    def derivative(self, mapped_CV: Tensor) -> Tensor | float:
        """Return the map's derivative where it gave `mapped_CV`."""
        if self.softcap is None:
            return self.scale
        return self.scale * (1 - (mapped_CV / self.softcap).square())


def logit_map_of(config: Any) -> LogitMap:
    """Return what a model with this configuration does to its head's output, by the names that models have for it.

    The check before training compares it with the model's own logits.
    """
    text = config.get_text_config()

    def number(*names: str) -> float | None:
        found = [getattr(text, name, None) for name in names]
        return next((float(value) for value in found if isinstance(value, int | float) and value), None)

    scale = number("logits_scaling", "logits_mup_width_multiplier") or 1.0
    if text.model_type not in MULTIPLIES:
        scale = 1.0 / scale
    if text.model_type not in IGNORES_SCALE:
        scale *= number("logit_scale", "lm_head_multiplier") or 1.0
    return LogitMap(scale, number("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap"))


def _chunk_logits(hidden_CH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, logit_map: LogitMap) -> Tensor:
    """Return the model's logits for a chunk, [C, V], float32, in a buffer of their own."""
    return logit_map.apply_(linear(hidden_CH, weight_VH, bias_V).float())


def _logsumexp_(logits_CV: Tensor) -> Tensor:
    """Return log sum exp over the vocabulary, [C], using up the logits' buffer."""
    largest_C1 = logits_CV.amax(-1, keepdim=True)
    return logits_CV.sub_(largest_C1).exp_().sum(-1).log_() + largest_C1.squeeze(-1)


def _score_(logits_CV: Tensor, token_C: Tensor) -> tuple[Tensor, Tensor]:
    """Return each token's logit and the normaliser, [C] each, using up the logits' buffer."""
    logit_C = logits_CV.gather(-1, token_C[:, None]).squeeze(-1)
    return logit_C, _logsumexp_(logits_CV)


def _gradient_(logits_CV: Tensor, normaliser_C: Tensor, token_C: Tensor, grad_C: Tensor, logit_map: LogitMap) -> Tensor:
    """Turn mapped logits into the gradient of the head's output, in place."""
    derivative = logit_map.derivative(logits_CV)
    # d log p(token) / d logits = onehot(token) - softmax(logits)
    grad_CV = logits_CV.sub_(normaliser_C[:, None]).exp_().neg_()
    grad_CV.scatter_add_(-1, token_C[:, None], torch.ones_like(grad_CV[:, :1]))
    return grad_CV.mul_(grad_C[:, None]).mul_(derivative)


@functools.cache
def _compiled(function: Callable[..., Any], backend: str | None) -> Callable[..., Any]:
    """Return the passes over a chunk's logits as one kernel, or as they are where there is no backend."""
    return function if backend is None else torch.compile(function, backend=backend, dynamic=True)


class _LinearLogProbs(torch.autograd.Function):
    """log softmax(head(hidden))[token], chunk by chunk; the head's gradient is summed over chunks in float32."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_KH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        token_K: Tensor,
        logit_map: LogitMap,
        chunk: int,
        backend: str | None,
    ) -> Tensor:
        score_ = _compiled(_score_, backend)
        log_prob_K = torch.empty(len(token_K), dtype=torch.float32, device=hidden_KH.device)
        normaliser_K = torch.empty_like(log_prob_K)
        for s in _slices(len(token_K), chunk):
            logits_CV = _chunk_logits(hidden_KH[s], weight_VH, bias_V, logit_map)
            log_prob_K[s], normaliser_K[s] = score_(logits_CV, token_K[s])
        log_prob_K -= normaliser_K
        ctx.save_for_backward(hidden_KH, weight_VH, bias_V, token_K, normaliser_K)
        ctx.logit_map, ctx.chunk, ctx.backend = logit_map, chunk, backend
        device = hidden_KH.device.type
        # The meta device, on which memory is counted, has no autocast to ask about.
        has_autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        ctx.dtype = torch.get_autocast_dtype(device) if has_autocast else hidden_KH.dtype
        return log_prob_K

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        hidden_KH, weight_VH, bias_V, token_K, normaliser_K = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden_KH = torch.zeros_like(hidden_KH) if needs_hidden else None
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=torch.float32) if needs_weight else None
        grad_bias_V = torch.zeros_like(bias_V, dtype=torch.float32) if needs_bias else None
        gradient_ = _compiled(_gradient_, ctx.backend)
        weight, bias = weight_VH.to(ctx.dtype), None if bias_V is None else bias_V.to(ctx.dtype)
        for s in _slices(len(token_K), ctx.chunk):
            hidden_CH = hidden_KH[s].to(ctx.dtype)
            logits_CV = _chunk_logits(hidden_CH, weight, bias, ctx.logit_map)
            grad_CV = gradient_(logits_CV, normaliser_K[s], token_K[s], grad_outputs[0][s], ctx.logit_map)
            if grad_bias_V is not None:
                grad_bias_V += grad_CV.sum(0)
            grad_CV = grad_CV.to(ctx.dtype)
            if grad_hidden_KH is not None:
                grad_hidden_KH[s] = linear(grad_CV, weight.t())
            if grad_weight_VH is not None and ctx.dtype == torch.float32:
                grad_weight_VH.addmm_(grad_CV.T, hidden_CH)
            elif grad_weight_VH is not None:
                grad_weight_VH += grad_CV.T @ hidden_CH
        return (
            grad_hidden_KH,
            None if grad_weight_VH is None else grad_weight_VH.to(weight_VH.dtype),
            None if grad_bias_V is None else grad_bias_V.to(bias_V.dtype),
            None,
            None,
            None,
            None,
        )


def _slices(length: int, chunk: int) -> list[slice]:
    return [slice(start, start + chunk) for start in range(0, length, chunk)]


def row_sums(value_K: Tensor, mask_BT: Tensor) -> Tensor:
    """Sum the values that belong to a mask's True places over each row: [B], float64, in a fixed order."""
    # The plainer masked_scatter makes a GPU's host wait, in its backward pass.
    places = mask_BT.flatten().cumsum(0)
    value_BT = F.pad(value_K.double(), (1, 0)).index_select(0, places).view(mask_BT.shape)
    return torch.where(mask_BT, value_BT, 0.0).sum(dim=1)


def chunk_tokens(weight_VH: Tensor) -> int:
    """Return how many tokens' logits are held at a time."""
    return max(1, CHUNK_ELEMENTS.get(weight_VH.device.type, CHUNK_ELEMENTS["cuda"]) // len(weight_VH))


def token_log_probs(
    hidden_KH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    token_K: Tensor,
    logit_map: LogitMap,
    compile_backend: str | None = None,
) -> Tensor:
    """Return log p(token_k | what came before), [K], float32, in nats, differentiable.

    Args:
        hidden_KH: [K, H], the last hidden state of the position before each token.
        weight_VH: [V, H], the head.
        bias_V: [V] or None.
        token_K: [K], the tokens.
        logit_map: what the model does to its logits.
        compile_backend: compile the passes over the logits with this backend of torch.compile; None does not.
    """
    chunk = chunk_tokens(weight_VH)
    return _LinearLogProbs.apply(hidden_KH, weight_VH, bias_V, token_K, logit_map, chunk, compile_backend)


@torch.no_grad()
def token_entropies(hidden_KH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, logit_map: LogitMap) -> Tensor:
    """Return the entropy of the next-token distribution at each position, [K], float32, in nats, without gradient."""
    entropy_K = torch.empty(len(hidden_KH), dtype=torch.float32, device=hidden_KH.device)
    for s in _slices(len(hidden_KH), chunk_tokens(weight_VH)):
        log_p_CV = F.log_softmax(_chunk_logits(hidden_KH[s], weight_VH, bias_V, logit_map), dim=-1)
        entropy_K[s] = -(log_p_CV.exp() * log_p_CV).sum(-1)
    return entropy_K
