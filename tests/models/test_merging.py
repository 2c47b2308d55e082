"""A merged model computes what base and adapter do, also where they part a weight that the base shares."""

import json

import peft
import pytest
import torch
import transformers

from openkto.config import LoraConfig
from openkto.errors import ConfigError
from openkto.models import Actor
from openkto.models.loading import load_model
from openkto.models.merging import merge_adapter, part_shared_weights
from tests.text_rows import byte_tokenizer, write_model

IDS = torch.arange(3, 43).view(2, 20)
EMBEDDING = dict(target_modules=["embed_tokens", "q_proj"])
WHOLE_EMBEDDING = dict(target_modules=["q_proj"], lora_modules_to_save=["embed_tokens"])
WHOLE_HEAD = dict(target_modules=["q_proj"], lora_modules_to_save=["lm_head"])
WHOLE_BOTH = dict(target_modules=["q_proj"], lora_modules_to_save=["embed_tokens", "lm_head"])


def write_adapter(place, **lora):
    """Write a tied base and an adapter on it with random weights; return the actor that it came from."""
    write_model(place / "base", tie_word_embeddings=True)
    actor = Actor(str(place / "base"), lora=LoraConfig(lora_rank=4, **lora))
    torch.manual_seed(1)
    trained = {name: p for name, p in actor.model.named_parameters() if p.requires_grad}
    for parameter in trained.values():
        torch.nn.init.normal_(parameter, std=0.2)
    actor.export({name: p.detach() for name, p in trained.items()}, byte_tokenizer(), place / "adapter", torch.float32)
    (place / "whole").mkdir()
    return actor


def peft_model(place):
    return peft.PeftModel.from_pretrained(load_model(str(place / "base")), place / "adapter", is_trainable=True)


def logits(model):
    return model.eval()(input_ids=IDS).logits


@pytest.mark.filterwarnings("ignore::UserWarning")  # peft's own, of the tied weights
@pytest.mark.parametrize("lora", [EMBEDDING, WHOLE_EMBEDDING, WHOLE_HEAD, WHOLE_BOTH])
def test_adapters_that_part_a_tied_pair_train_and_merge_as_peft_computes(tmp_path, lora, caplog):
    actor, theirs = write_adapter(tmp_path, **lora), peft_model(tmp_path)
    assert "embedding and head share one weight in this model, and no longer do" in caplog.text
    scored = torch.ones_like(IDS, dtype=torch.bool)
    scored[:, 0] = False
    ours_B = actor.eval()(IDS, torch.ones_like(IDS), scored).log_prob_B
    theirs_B = logits(theirs)[:, :-1].log_softmax(-1).gather(-1, IDS[:, 1:, None]).double().sum((1, 2))
    torch.testing.assert_close(ours_B, theirs_B)
    for loss in (ours_B.sum(), theirs_B.sum()):
        loss.backward()
    gradients = [{n: p.grad for n, p in m.named_parameters() if p.requires_grad} for m in (actor.model, theirs)]
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-4, atol=1e-4)

    merge_adapter(str(tmp_path / "adapter"), byte_tokenizer(), tmp_path / "whole", None)
    assert json.loads((tmp_path / "whole/config.json").read_text())["tie_word_embeddings"] is False
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    torch.testing.assert_close(logits(whole), logits(theirs), rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["use_dora", "use_rslora"])
def test_adapters_of_other_kinds_merge_as_peft_computes(tmp_path, kind):
    write_adapter(tmp_path, **{kind: True})
    merge_adapter(str(tmp_path / "adapter"), byte_tokenizer(), tmp_path / "whole", None)
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    with torch.no_grad():
        torch.testing.assert_close(logits(whole), logits(peft_model(tmp_path)), rtol=0, atol=1e-4)


def test_an_adapter_that_leaves_a_tied_pair_alone_leaves_it_tied(tmp_path, caplog):
    write_adapter(tmp_path, target_modules=["q_proj"])
    merge_adapter(str(tmp_path / "adapter"), byte_tokenizer(), tmp_path / "whole", None)
    assert json.loads((tmp_path / "whole/config.json").read_text())["tie_word_embeddings"] is True
    assert "share one weight" not in caplog.text


def test_layers_that_share_a_weight_are_parted_only_where_one_is_adapted(tmp_path):
    model = load_model(str(write_model(tmp_path / "base")))
    first, second = (layer.self_attn for layer in model.model.layers)
    second.q_proj.weight, second.k_proj.weight = first.q_proj.weight, first.k_proj.weight
    config = peft.LoraConfig(target_modules=["model.layers.0.self_attn.q_proj"])
    part_shared_weights(peft.get_peft_model(model, config))
    assert first.q_proj.base_layer.weight is not second.q_proj.weight
    assert torch.equal(first.q_proj.base_layer.weight, second.q_proj.weight)
    assert first.k_proj.weight is second.k_proj.weight


def test_a_merged_model_that_computes_something_else_is_refused_and_takes_no_place(tmp_path):
    write_adapter(tmp_path, target_modules=["q_proj"])
    base = load_model(str(tmp_path / "base"))
    base.get_input_embeddings().weight.data.mul_(1e6)  # finite in float32, as the first norm divides by it
    base.lm_head.weight = torch.nn.Parameter(base.lm_head.weight.detach() * 1e-6)
    base.config.tie_word_embeddings = False
    base.save_pretrained(tmp_path / "base")
    with pytest.raises(ConfigError, match="the merged model must compute the same as base model and adapter; got nan"):
        merge_adapter(str(tmp_path / "adapter"), byte_tokenizer(), tmp_path / "whole", "fp16")
    assert list((tmp_path / "whole").iterdir()) == []
    merge_adapter(str(tmp_path / "adapter"), byte_tokenizer(), tmp_path / "whole", "bf16")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_single_tokens_of_a_tied_pair_are_refused_and_of_an_untied_embedding_train_and_merge(tmp_path):
    for tied in (True, False):
        write_model(tmp_path / "base", tie_word_embeddings=tied)
        config = peft.LoraConfig(target_modules=["q_proj"], trainable_token_indices=[5, 7], task_type="CAUSAL_LM")
        theirs = peft.get_peft_model(load_model(str(tmp_path / "base")), config)
        for name, parameter in theirs.named_parameters():
            if "trainable_tokens_delta" in name:
                torch.nn.init.normal_(parameter, std=0.3)
        theirs.save_pretrained(tmp_path / "adapter")
        if tied:
            with pytest.raises(ConfigError, match="single tokens of the head cannot be trained; got trainable_token"):
                Actor(str(tmp_path / "adapter"))
    (tmp_path / "whole").mkdir()
    merge_adapter(str(tmp_path / "adapter"), byte_tokenizer(), tmp_path / "whole", None)
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    torch.testing.assert_close(logits(whole), logits(theirs), rtol=0, atol=1e-4)
