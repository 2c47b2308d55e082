"""What is counted on the meta device: by hand where a hand can, and the same however many layers are run."""

import dataclasses

import pytest
import torch

from openkto.config import LoraConfig
from openkto.models import Actor
from openkto.planning import activations
from openkto.planning.activations import Activations, Shape, count_forward, count_training
from tests.tiny import tiny_llama

MICRO_BATCH = Shape(1, 512, 256)


def count(recomputation="none", *, lora_rank=0, layers=5) -> Activations:
    with torch.device("meta"):
        actor = Actor(tiny_llama(num_hidden_layers=layers), lora=LoraConfig(lora_rank=lora_rank))
    return count_training(actor, MICRO_BATCH, recomputation, "cpu")


@pytest.mark.parametrize("recomputation", ["none", "selective", "whole"])
def test_layers_that_are_alike_need_not_all_be_run(recomputation, monkeypatch):
    few = dataclasses.astuple(count(recomputation))
    monkeypatch.setattr(activations, "LAYERS", (1, 5))
    assert few == pytest.approx(dataclasses.astuple(count(recomputation)), rel=0.01)


def test_whole_recomputation_keeps_the_input_of_each_layer():
    """Of 512 tokens a layer's input has 32 elements of 4 bytes each."""
    assert count("whole", layers=7).kept - count("whole", layers=5).kept == pytest.approx(2 * 512 * 32 * 4, rel=0.02)


def test_a_forward_without_gradient_keeps_no_layer():
    with torch.device("meta"):
        shallow, deep = (Actor(tiny_llama(num_hidden_layers=n)) for n in (3, 9))
    assert count_forward(shallow, MICRO_BATCH, "cpu").peak == count_forward(deep, MICRO_BATCH, "cpu").peak


def test_selective_checkpointing_with_an_adapter_may_keep_more_than_none():
    assert count("selective", lora_rank=4).kept > count("none", lora_rank=4).kept
    assert count("selective").kept < 0.75 * count("none").kept
