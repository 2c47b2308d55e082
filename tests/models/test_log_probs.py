"""Chunked log-probabilities: exact, precise in halves, and gradients for whatever asks for one."""

import pytest
import torch
import torch.nn.functional as F

from openkto.models import log_probs
from openkto.models.log_probs import LogitMap, token_entropies, token_log_probs


def tensors(tokens=11, hidden=6, vocabulary=23, dtype=torch.float32, scale=1.0, bias=True):
    generator = torch.Generator().manual_seed(0)
    hidden_KH = torch.randn(tokens, hidden, generator=generator).to(dtype).requires_grad_()
    weight_VH = (scale * torch.randn(vocabulary, hidden, generator=generator)).to(dtype).requires_grad_()
    bias_V = torch.randn(vocabulary, generator=generator).to(dtype).requires_grad_() if bias else None
    return hidden_KH, weight_VH, bias_V, torch.randint(0, vocabulary, (tokens,), generator=generator)


@pytest.mark.parametrize("chunk", [1, 4, 100])
@pytest.mark.parametrize("logit_map", [LogitMap(), LogitMap(scale=0.5, softcap=2.0)])
@pytest.mark.parametrize(("bias", "backend"), [(True, None), (False, None), (True, "aot_eager")])
def test_values_and_gradients_equal_the_plain_formula(chunk, logit_map, bias, backend, monkeypatch):
    monkeypatch.setattr(log_probs, "chunk_tokens", lambda weight: chunk)
    hidden, weight, bias_V, token = tensors(bias=bias)
    inputs = [t for t in (hidden, weight, bias_V) if t is not None]
    factor = torch.arange(1.0, 12.0)
    logits = F.linear(hidden, weight, bias_V) * logit_map.scale
    if logit_map.softcap is not None:
        logits = logit_map.softcap * torch.tanh(logits / logit_map.softcap)
    expected = logits.log_softmax(-1).gather(-1, token[:, None]).squeeze(-1)
    expected_gradients = torch.autograd.grad((expected * factor).sum(), inputs)
    values = token_log_probs(hidden, weight, bias_V, token, logit_map, backend)
    gradients = torch.autograd.grad((values * factor).sum(), inputs)
    torch.testing.assert_close(values, expected)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-5)


def test_a_frozen_head_gets_no_gradient_and_costs_none():
    hidden, weight, _, token = tensors(bias=False)
    weight.requires_grad_(False)
    token_log_probs(hidden, weight, None, token, LogitMap()).sum().backward()
    assert weight.grad is None
    assert float(hidden.grad.abs().sum()) > 0


def test_no_scored_token_gives_zero_gradients():
    hidden, weight, bias, token = tensors()
    token_log_probs(hidden[:0], weight, bias, token[:0], LogitMap()).sum().backward()
    assert float(weight.grad.abs().sum()) == float(hidden.grad.abs().sum()) == 0.0


def test_bfloat16_with_large_logits_stays_within_a_thousandth_of_float64():
    hidden, weight, _, token = tensors(tokens=512, dtype=torch.bfloat16, scale=50.0, bias=False)
    values = token_log_probs(hidden, weight, None, token, LogitMap()).detach()
    logits = F.linear(hidden, weight).detach().double()
    expected = logits.log_softmax(-1).gather(-1, token[:, None]).squeeze(-1)
    assert values.dtype == torch.float32
    assert values.isfinite().all()
    assert float((values.double().sum() - expected.sum()).abs() / expected.sum().abs()) < 1e-3


def test_the_heads_gradient_does_not_lose_digits_over_many_chunks(monkeypatch):
    monkeypatch.setattr(log_probs, "chunk_tokens", lambda weight: 1)
    hidden, weight, _, token = tensors(tokens=512, dtype=torch.bfloat16, bias=False)
    token_log_probs(hidden, weight, None, token, LogitMap()).sum().backward()
    exact = weight.detach().double().requires_grad_()
    logits = F.linear(hidden.detach().double(), exact)
    logits.log_softmax(-1).gather(-1, token[:, None]).sum().backward()
    error = (weight.grad.double() - exact.grad).norm() / exact.grad.norm()
    assert float(error) < 5e-3  # bfloat16 sums over 512 chunks would be off by several times that


def test_entropies_equal_the_definition():
    hidden, weight, bias, _ = tensors()
    p = F.linear(hidden, weight, bias).softmax(-1)
    torch.testing.assert_close(
        token_entropies(hidden, weight, bias, LogitMap()), -(p * p.log()).sum(-1).detach(), rtol=1e-5, atol=1e-6
    )
