"""An adapter's folder: what is wrong with it is one sentence; on the model it computes what peft does."""

import json

import peft
import pytest
import safetensors.torch
import torch

from openkto.config import LoraConfig
from openkto.errors import ConfigError
from openkto.models import Actor, load_tokenizer
from openkto.models.loading import load_config, load_model
from tests.text_rows import byte_tokenizer, write_model
from tests.tiny import tiny_llama

IDS = torch.arange(3, 23).view(2, 10)
SCORED = torch.ones_like(IDS, dtype=torch.bool)
SCORED[:, :4] = False


@pytest.fixture
def folder(tmp_path):
    """An adapter that changes what the model computes, without a tokenizer, beside its base."""
    write_model(tmp_path / "base")
    model = Actor(str(tmp_path / "base"), lora=LoraConfig(lora_rank=4, lora_dropout=0.5)).model
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def change_config(folder, **values):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def refusal(call, *arguments, **more) -> str:
    with pytest.raises(ConfigError) as error:
        call(*arguments, **more)
    message = str(error.value)
    assert "\n" not in message
    return message


def log_probs(actor):
    with torch.no_grad():
        return actor(IDS, torch.ones_like(IDS), SCORED).log_prob_B


def test_an_actor_of_an_adapters_folder_computes_what_peft_does(folder):
    actor = Actor(str(folder))
    theirs = peft.PeftModel.from_pretrained(load_model(str(folder.parent / "base")), folder).eval()
    with torch.no_grad():
        tokens = theirs(input_ids=IDS).logits[:, :-1].log_softmax(-1).gather(-1, IDS[:, 1:, None]).squeeze(-1)
    torch.testing.assert_close(log_probs(actor), tokens[:, 3:].double().sum(1))
    assert not torch.allclose(log_probs(actor), log_probs(Actor(str(folder.parent / "base"))), atol=0.1)
    # The dropout that it was trained with is not in it: two forwards in training mode agree.
    assert torch.equal(log_probs(actor.train()), log_probs(actor))


@pytest.mark.parametrize("keeps_start", [False, True])
def test_the_reference_is_the_base_or_the_adapter_as_it_started(folder, keeps_start):
    actor = Actor(str(folder), keeps_start=keeps_start)
    start = log_probs(actor)
    for name, parameter in actor.model.named_parameters():
        if parameter.requires_grad:
            parameter.data.add_(0.1)
            assert ".default." in name
    changed = log_probs(actor)
    trainable = {name for name, p in actor.named_parameters() if p.requires_grad}
    with actor.reference():
        reference = log_probs(actor)
    assert torch.equal(reference, start if keeps_start else log_probs(Actor(str(folder.parent / "base"))))
    assert torch.equal(log_probs(actor), changed)
    assert {name for name, p in actor.named_parameters() if p.requires_grad} == trainable


def test_an_adapters_configuration_and_tokenizer_are_its_bases(folder):
    assert load_config(str(folder)).model_type == "llama"
    assert len(load_tokenizer(str(folder))) == len(byte_tokenizer())
    own = byte_tokenizer()
    own.add_tokens(["another"])
    own.save_pretrained(folder)
    assert len(load_tokenizer(str(folder))) == len(own)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"base_model_name_or_path": "/nowhere/base"},
            "adapter_config.json must name the base model; got /nowhere/base, no folder. Correct "
            "base_model_name_or_path there.",
        ),
        ({"base_model_name_or_path": None}, "adapter_config.json must name the base model; got none."),
        ({"peft_type": "IA3"}, "must be a LoRA adapter; got IA3. Name one that is."),
        ({"peft_type": "of tomorrow"}, "cannot read adapter_config.json"),
        ({"bias": "all"}, "the adapter must not change biases; got bias 'all'."),
        (
            {"init_lora_weights": "pissa"},
            "the adapter must not change its base model; got one made by pissa, which changes it.",
        ),
        ({"r": 5}, "cannot load the adapter on "),
        ({"target_modules": ["q_proj"]}, "the adapter's weights must be those of its configuration on "),
        ({"target_modules": ["q_proj", "lm_head"]}, "the adapter's weights must be those of its configuration on "),
        ({"target_modules": ["c_attn"]}, "cannot load the adapter on "),
    ],
)
def test_an_adapter_that_cannot_serve_is_one_sentence(folder, change, sentence):
    change_config(folder, **change)
    message = refusal(Actor, str(folder))
    assert message.startswith(f"{folder}: ")
    assert sentence in message


def test_an_adapter_on_the_head_is_refused(folder):
    model = peft.get_peft_model(tiny_llama(), peft.LoraConfig(target_modules=["lm_head"]))
    model.save_pretrained(folder)
    change_config(folder, base_model_name_or_path=str(folder.parent / "other"))
    tiny_llama().save_pretrained(folder.parent / "other")
    assert "the head cannot be adapted; got one with LoRA on it." in refusal(Actor, str(folder))


def test_an_adapter_whose_files_are_broken_is_one_sentence(folder):
    file = folder / "adapter_model.safetensors"
    tensors = safetensors.torch.load_file(file)
    name = next(iter(tensors))
    safetensors.torch.save_file({key: tensor for key, tensor in tensors.items() if key != name}, file)
    assert "got a difference in " in refusal(Actor, str(folder))
    file.write_bytes(file.read_bytes()[:100])
    assert f"{file}: must hold all of its weights; got a file of 100 bytes that is cut or damaged." in refusal(
        Actor, str(folder)
    )
    file.unlink()
    assert "cannot load the adapter on " in refusal(Actor, str(folder))
    (folder / "adapter_config.json").write_text("{")
    assert "cannot read adapter_config.json" in refusal(Actor, str(folder))


def test_4_bits_need_a_gpu(tmp_path):
    write_model(tmp_path)
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    message = refusal(Actor, str(tmp_path), lora=LoraConfig(lora_rank=4, load_in_4bit=True))
    assert message == "--load_in_4bit: needs a CUDA GPU; got none. Leave it out."


def test_scaling_is_alpha_over_rank_or_over_its_root():
    for settings, scaling in (({}, 4.0), ({"use_rslora": True}, 8.0)):
        lora = LoraConfig(lora_rank=4, lora_alpha=16, target_modules=["q_proj"], **settings)
        layer = Actor(tiny_llama(), lora=lora).language_model.model.layers[0].self_attn.q_proj
        assert layer.scaling["default"] == scaling
        assert layer.lora_A["default"].weight.shape == (4, 32)
