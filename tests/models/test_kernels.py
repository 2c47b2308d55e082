"""Liger's layers: refused where they cannot run, and the layers alone where they can."""

import sys
import types

import pytest
import torch
import transformers

from openkto.errors import ConfigError
from openkto.models.kernels import compile_layers, use_liger_layers

LLAMA = transformers.LlamaConfig()


def refusal(config=LLAMA) -> str:
    with pytest.raises(ConfigError) as caught:
        use_liger_layers(config)
    return str(caught.value)


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.fixture
def package(monkeypatch):
    """A package with Liger's table of models, which notes what it is asked for."""
    asked = []
    patches = types.ModuleType("liger_kernel.transformers.monkey_patch")
    patches.MODEL_TYPE_TO_APPLY_LIGER_FN = {"llama": lambda **options: asked.append(options)}
    for name, module in (("liger_kernel", None), ("liger_kernel.transformers", None), (patches.__name__, patches)):
        monkeypatch.setitem(sys.modules, name, module or types.ModuleType(name))
    return asked


def test_a_machine_without_a_gpu_is_refused(package):
    assert refusal() == "--use_liger_kernel: needs a CUDA GPU; got none. Leave it out."
    assert package == []


def test_a_python_without_the_package_is_refused(gpu, monkeypatch):
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    assert refusal().startswith("--use_liger_kernel: needs the package liger_kernel; got ")


def test_a_model_that_the_package_does_not_know_is_refused(gpu, package):
    assert refusal(transformers.GPT2Config()) == (
        "--use_liger_kernel: needs a model that the package knows; got gpt2. Leave it out. There are: llama."
    )


def test_its_losses_stay_off(gpu, package):
    use_liger_layers(LLAMA)
    assert package == [{"cross_entropy": False, "fused_linear_cross_entropy": False}]


def test_the_real_package_changes_layers_alone(gpu, monkeypatch):
    pytest.importorskip("liger_kernel", exc_type=ImportError)
    from transformers.models.llama import modeling_llama

    for name in ("LlamaRMSNorm", "LlamaMLP", "apply_rotary_pos_emb"):
        monkeypatch.setattr(modeling_llama, name, getattr(modeling_llama, name))  # put back afterwards
    forward = modeling_llama.LlamaForCausalLM.forward
    use_liger_layers(LLAMA)
    assert modeling_llama.LlamaRMSNorm.__name__ == "LigerRMSNorm"
    assert modeling_llama.LlamaMLP.__name__ == "LigerSwiGLUMLP"
    assert modeling_llama.apply_rotary_pos_emb.__name__ == "liger_rotary_pos_emb"
    assert modeling_llama.LlamaForCausalLM.forward is forward


def test_a_model_without_layers_is_not_compiled():
    with pytest.raises(ConfigError) as caught:
        compile_layers(torch.nn.Linear(2, 2))
    assert str(caught.value) == ("--torch_compile: needs a model of decoder layers; got Linear without. Leave it out.")
