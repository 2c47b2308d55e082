"""Linear layers through oneDNN: torch's own numbers, by the operator that is meant to compute them, and no others."""

import copy
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from openkto.models import Actor, onednn
from openkto.models.onednn import linear, use_onednn
from tests.tiny import Count, tiny_llama


def layers(*, bias=True, inside=48, outside=80):
    torch.manual_seed(0)
    plain = nn.Linear(inside, outside, bias=bias)
    fast = copy.deepcopy(plain)
    use_onednn(fast)
    return plain, fast


@pytest.mark.parametrize("shape", [(1, 48), (37, 48), (3, 5, 48), (0, 48), (48,)], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_values_and_gradients_are_torchs(shape, bias):
    plain, fast = layers(bias=bias)
    inputs = [torch.randn(shape, generator=torch.manual_seed(1)).requires_grad_() for _ in range(2)]
    results = [layer(own) for layer, own in zip((plain, fast), inputs, strict=True)]
    weights = torch.randn_like(results[0])
    for result in results:
        (result * weights).sum().backward()
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad, rtol=1e-5, atol=1e-6)
    for one, other in zip(fast.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-6)


def test_it_is_onednn_that_multiplies():
    _, fast = layers()
    with Count() as seen:
        fast(torch.randn(4, 48, requires_grad=True)).sum().backward()
    assert seen.runs["openkto::product"] == 2  # the result, and the gradient of the input
    assert seen.runs["aten::mm"] == 1  # that of the weight


def test_a_frozen_layer_keeps_no_input_and_computes_no_gradient_of_its_own():
    _, fast = layers()
    fast.requires_grad_(False)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.shape) or tensor, lambda x: x):
        result = fast(torch.randn(4, 48, requires_grad=True))
    assert kept == [(80, 48)]
    with Count() as seen:
        result.sum().backward()
    assert "aten::mm" not in seen.runs
    assert fast.weight.grad is None


@pytest.mark.parametrize(
    "case", ["half", "autocast", "another class", "no operator"], ids=lambda case: case.replace(" ", "-")
)
def test_other_layers_are_torchs(case, monkeypatch):
    if case == "no operator":
        monkeypatch.setattr(onednn, "_ONEDNN", None)
    layer = nn.LazyLinear(80) if case == "another class" else nn.Linear(48, 80)
    layer = layer.to(torch.bfloat16) if case == "half" else layer
    use_onednn(layer)
    inputs = torch.randn(4, 48, dtype=torch.bfloat16 if case == "half" else torch.float32)
    with Count() as seen, torch.autocast("cpu", dtype=torch.bfloat16, enabled=case == "autocast"):
        result = layer(inputs)
    assert "openkto::product" not in seen.runs
    assert result.dtype == (torch.bfloat16 if case in ("half", "autocast") else torch.float32)


@pytest.mark.parametrize(("maker", "products"), [("AuthenticAMD", 1), ("GenuineIntel", 0), (None, 1)])
def test_layers_are_torchs_on_an_intel_processor(maker, products, tmp_path, monkeypatch):
    monkeypatch.setattr(onednn, "CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    if maker is not None:
        onednn.CPU_INFO.write_text(f"processor\t: 0\nvendor_id\t: {maker}\n", encoding="utf-8")
    actor = Actor(tiny_llama())
    actor.run_on(torch.device("cpu"))
    with Count() as seen:
        actor.body.layers[0].self_attn.q_proj(torch.randn(2, 32))
    assert seen.runs.get("openkto::product", 0) == products


def test_a_wrong_shape_is_torchs_error():
    with pytest.raises(RuntimeError, match=r"cannot be multiplied \(4x47 and 48x80\)"):
        layers()[1](torch.randn(4, 47))


def test_a_copy_multiplies_with_its_own_weight():
    _, fast = layers()
    other = copy.deepcopy(fast)
    nn.init.zeros_(other.weight)
    assert torch.equal(other(torch.ones(1, 48))[0], other.bias)


def test_a_compiler_need_not_run_it_to_know_its_shape():
    fake = torch.library.opcheck
    left, right, bias = torch.randn(2, 3, 48), torch.randn(80, 48), torch.randn(80)
    fake(torch.ops.openkto.product.default, (left, right, bias), test_utils=("test_schema", "test_faketensor"))
    assert linear(left, right, bias).shape == (2, 3, 80)


@pytest.mark.parametrize(
    ("capacity", "is_made_again"),
    [pytest.param(None, True, id="own"), pytest.param("1024", False, id="the user's", marks=pytest.mark.slow)],
)
def test_kernels_of_many_token_counts_are_not_all_kept(capacity, is_made_again):
    """oneDNN says when it makes a kernel; the last product has the shape of the first, 100 others between them."""
    code = f"""
import runpy, torch
linear = runpy.run_path({onednn.__file__!r})["linear"]
for rows in [*range(2, 103), 2]:
    print("product", flush=True)
    linear(torch.ones(rows, 8), torch.ones(16, 8))
"""
    environment = os.environ | {"ONEDNN_VERBOSE": "profile_create"}
    for variable in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        environment.pop(variable, None)
        if capacity is not None:
            environment[variable] = capacity
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    products = done.stdout.split("product\n")[1:]
    assert len(products) == 102
    assert "cache_miss" in products[0]
    assert ("cache_miss" in products[-1]) == is_made_again
