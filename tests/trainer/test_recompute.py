"""Recomputed activations and compiled layers change when things are computed, not what."""

import os

import pytest
import torch

from openkto.config import LoraConfig
from openkto.models import Actor
from openkto.models.onednn import use_onednn
from tests.helpers.runs import MIXED, assert_same, train
from tests.ranks import run_ranks
from tests.tiny import Count, tiny_llama

IDS_BT = torch.arange(3, 51).view(4, 12)
MASK_BT = torch.ones_like(IDS_BT, dtype=torch.bool).index_fill(1, torch.tensor([0]), False)


def gradients(**settings):
    """Return a micro-batch's log-probabilities and its gradients, by name, of a fresh tiny model."""
    actor = Actor(tiny_llama(), **settings).train()
    with torch.no_grad():  # as in a step: the mismatched pairs come first
        actor(IDS_BT[:2], torch.ones_like(IDS_BT[:2]), MASK_BT[:2])
    log_prob_B = actor(IDS_BT, torch.ones_like(IDS_BT), MASK_BT).log_prob_B
    log_prob_B.sum().backward()
    return log_prob_B.detach(), {name: p.grad for name, p in actor.named_parameters() if p.grad is not None}


def assert_alike(some, others):
    torch.testing.assert_close(some[0], others[0], rtol=1e-6, atol=1e-6)
    assert some[1].keys() == others[1].keys()
    for name, gradient in some[1].items():
        torch.testing.assert_close(gradient, others[1][name], rtol=1e-4, atol=1e-5, msg=lambda t, name=name: name + t)


@pytest.mark.parametrize("lora", [LoraConfig(), LoraConfig(lora_rank=4)], ids=["full", "lora"])
@pytest.mark.parametrize("how", [True, "selective"])
def test_gradients_are_those_without_recomputation(how, lora):
    assert_alike(gradients(lora=lora), gradients(lora=lora, gradient_checkpointing=how))


def runs(how, product):
    """Return how often a forward and backward run a product, attention and SiLU."""
    actor = Actor(tiny_llama(), gradient_checkpointing=how).train()
    if product == "openkto::product":
        use_onednn(actor)
    with Count() as count:
        actor(IDS_BT, torch.ones_like(IDS_BT), MASK_BT).log_prob_B.sum().backward()
    attention = "aten::_scaled_dot_product_flash_attention_for_cpu"
    return tuple(count.runs[name] for name in (product, attention, "aten::silu"))


@pytest.mark.parametrize("product", ["aten::mm", "openkto::product"])
def test_selective_runs_no_product_and_no_attention_again_but_what_is_cheap(product):
    none, whole, selective = (runs(how, product) for how in (False, True, "selective"))
    assert selective == (none[0], none[1], 2 * none[2])
    assert whole[0] > none[0]
    assert (whole[1], whole[2]) == (2 * none[1], 2 * none[2])


def kept_bytes(how):
    """Return how much a forward leaves for the backward."""
    actor = Actor(tiny_llama(num_hidden_layers=8), gradient_checkpointing=how).train()
    seen = {}

    def note(tensor):
        seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        actor(IDS_BT, torch.ones_like(IDS_BT), MASK_BT)
    return sum(seen.values())


def test_whole_recomputation_keeps_less():
    assert kept_bytes(True) < kept_bytes(False) / 3


def recomputing_run(folder, zero_stage, how, lora):
    more = {"lora": LoraConfig(lora_rank=4), "ref_mode": "adapter"} if lora else {}
    return train(MIXED, folder, zero_stage, 4, 2, 3, gradient_checkpointing=how, **more)


@pytest.mark.parametrize(
    ("zero_stage", "lora"),
    [*(pytest.param(n, False, marks=pytest.mark.slow) for n in (0, 1, 3)), (2, False), (3, True)],
    ids=str,
)
def test_selective_recomputation_changes_no_step_on_any_stage(tmp_path, zero_stage, lora):
    plain = run_ranks(recomputing_run, 1, tmp_path, tmp_path / "plain", 0, False, lora)[0]
    others = run_ranks(recomputing_run, 2, tmp_path, tmp_path / "selective", zero_stage, "selective", lora)[0]
    assert_same(plain, others)


def compiled_run(folder, zero_stage, backend, how, lora):
    os.environ["TORCHDYNAMO_DISABLE"], torch._dynamo.config.disable = (
        "",
        False,
    )  # the tests' processes have it off, for a faster start
    more = {"lora": LoraConfig(lora_rank=4), "ref_mode": "adapter"} if lora else {}
    return train(MIXED, folder, zero_stage, 4, 2, 3, compile_backend=backend, gradient_checkpointing=how, **more), dict(
        torch._dynamo.utils.counters["stats"]
    )


@pytest.mark.slow
def test_gradients_are_those_of_layers_that_are_not_compiled():
    assert_alike(gradients(), gradients(compile_backend="aot_eager"))


def test_another_number_of_rows_compiles_nothing_new():
    actor = Actor(tiny_llama(num_hidden_layers=1), compile_backend="eager")
    graphs = [torch._dynamo.utils.counters["stats"]["unique_graphs"]]
    for rows in (2, 3, 4, 5):
        ids_BT, mask_BT = (whole.repeat(2, 1)[:rows] for whole in (IDS_BT, MASK_BT))
        actor(ids_BT, torch.ones_like(ids_BT), mask_BT)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[0] < graphs[2] == graphs[3] == graphs[4]  # the second made the shapes of the first variable


@pytest.mark.slow
@pytest.mark.parametrize(
    ("zero_stage", "how", "lora"), [(0, False, False), (2, True, False), (3, False, False), (3, True, True)], ids=str
)
def test_compiled_layers_change_no_step_on_any_stage(tmp_path, zero_stage, how, lora):
    plain = run_ranks(recomputing_run, 1, tmp_path, tmp_path / "plain", 0, False, lora)[0]
    others, stats = run_ranks(compiled_run, 2, tmp_path, tmp_path / "compiled", zero_stage, "eager", how, lora)[0]
    assert_same(plain, others)
    assert stats["unique_graphs"] > 0
