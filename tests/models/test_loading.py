"""What is wrong with a model folder is said in one sentence with its place."""

import json

import pytest
import torch
import transformers

from openkto.errors import ConfigError
from openkto.models import Actor, load_tokenizer
from openkto.models.loading import check_fits, check_same_vocabulary, load_config, load_model, stop_token_ids
from tests.models.architectures import GEMMA
from tests.text_rows import byte_tokenizer, write_model
from tests.tiny import tiny_llama


@pytest.fixture
def folder(tmp_path):
    tiny_llama().save_pretrained(tmp_path)
    return tmp_path


def refusal(call, *arguments) -> str:
    with pytest.raises(ConfigError) as error:
        call(*arguments)
    message = str(error.value)
    assert "\n" not in message
    return message


def test_a_missing_folder_is_named(tmp_path):
    assert refusal(load_config, str(tmp_path / "nothing")).endswith("nothing: no such folder. Check the path.")


def test_a_folder_without_a_model_is_named(tmp_path):
    assert "a model's folder holds a config.json; got none" in refusal(load_config, str(tmp_path))


@pytest.mark.parametrize("content", ["{", "[]", '{"model_type": "no such kind"}', "{}"])
def test_a_broken_config_is_one_sentence(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    assert "cannot load the model" in refusal(load_config, str(tmp_path))


def test_missing_weights_are_refused(folder):
    (folder / "model.safetensors").unlink()
    assert "cannot load the model" in refusal(load_model, str(folder))


def test_cut_weights_are_refused(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    assert "1000 bytes that is cut or damaged" in refusal(load_model, str(folder))


def test_weights_that_lack_a_layer_are_refused_not_invented(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    assert "must hold every parameter of the configuration; got none for model.layers.2" in refusal(
        load_model, str(folder)
    )


def test_weights_of_another_size_are_refused(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 99}))
    assert "cannot load the model" in refusal(load_model, str(folder))


def test_encoder_decoders_and_models_that_see_are_refused(tmp_path):
    transformers.T5Config().save_pretrained(tmp_path)
    assert "got t5, which has an encoder" in refusal(load_config, str(tmp_path))
    transformers.Gemma3Config().save_pretrained(tmp_path)
    assert "must be for text only; got gemma3 with a vision part. Write its text model out" in refusal(
        load_config, str(tmp_path)
    )


def test_a_models_own_python_runs_only_when_it_is_allowed(folder, tmp_path_factory):
    marker = tmp_path_factory.mktemp("marker") / "ran"
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    assert "Pass --trust_remote_code if you trust its author" in refusal(load_config, str(folder))
    assert not marker.exists()


def test_a_missing_tokenizer_is_said(folder):
    (folder / "tokenizer.json").write_text("{")
    assert "cannot load the tokenizer" in refusal(load_tokenizer, str(folder))
    (folder / "tokenizer.json").unlink()
    assert refusal(load_tokenizer, str(folder)).startswith(
        f"{folder}: must hold the model's tokenizer; got no file of one. Copy tokenizer.json and"
    )


def test_ids_and_positions_that_the_model_lacks_are_refused():
    llama = tiny_llama().config
    assert check_fits("m", llama, 128, 60) is None
    assert "longer than the 128 that m was made for" in check_fits("m", llama, 129, 60)
    assert "must be below the model's vocabulary, 61; got 61" in refusal(check_fits, "m", llama, 10, 61)
    gpt2 = transformers.GPT2Config(n_positions=16)
    assert "the model m has 16 positions; got sequences of up to 17" in refusal(check_fits, "m", gpt2, 17, 5)


def falcon():
    config = transformers.FalconConfig(
        vocab_size=61,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        hidden_dropout=0.5,
        attention_dropout=0.5,
    )
    return transformers.FalconForCausalLM(config)  # reads its dropout from the configuration in every forward


@pytest.mark.parametrize("make", [lambda: tiny_llama(attention_dropout=0.5), falcon], ids=["llama", "falcon"])
def test_two_forwards_of_an_actor_agree_whatever_the_models_dropout(make):
    model = make()
    actor = Actor(model).train()
    ids = torch.arange(3, 23).view(2, 10)
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[:, :4] = False
    first, second = (actor(ids, torch.ones_like(ids), mask).log_prob_B for _ in range(2))
    assert torch.equal(first, second)
    assert (
        actor.changes.of(actor.model.config)["attention_dropout"] == 0.5
    )  # the export writes the model's own configuration


def test_a_logit_scale_that_is_not_set_is_one():
    config = transformers.MptConfig(vocab_size=61, d_model=32, n_layers=1, n_heads=4)
    assert config.logit_scale is None
    Actor(transformers.MptForCausalLM(config)).check_forward(tolerance=1e-3)


def test_weights_that_are_not_numbers_are_said_to_be_broken():
    model = tiny_llama()
    model.model.norm.weight.data[3] = float("nan")
    with pytest.raises(ConfigError, match=r"must be finite; got nan or infinity\. Its weights are broken"):
        Actor(model).check_forward(tolerance=1e-3)


@pytest.mark.parametrize("name", ["flash_attention_2", "flash_attention_3", "flex_attention"])
def test_attention_that_cannot_serve_names_the_flag(name):
    with pytest.raises(ConfigError, match=f"--attn_implementation: {name} needs a GPU and its package"):
        Actor("nowhere", attn_implementation=name)


def test_a_reference_with_another_vocabulary_is_refused(tmp_path):
    write_model(tmp_path / "reference")
    tokenizer = byte_tokenizer()
    check_same_vocabulary(tokenizer, str(tmp_path / "reference"))
    tokenizer.add_tokens(["another"])
    assert "must have the policy's vocabulary" in refusal(check_same_vocabulary, tokenizer, str(tmp_path / "reference"))
    (tmp_path / "reference/tokenizer_config.json").unlink()
    assert "must have the policy's vocabulary" in refusal(check_same_vocabulary, tokenizer, str(tmp_path / "reference"))


@pytest.mark.parametrize("change", [{"num_attention_heads": 0}, {"hidden_size": -1}, {"num_hidden_layers": "two"}])
def test_settings_that_make_no_model_are_one_sentence(folder, change):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    assert "cannot load the model" in refusal(load_model, str(folder))


def test_a_head_that_does_something_unknown_is_refused():
    model = tiny_llama()
    model.lm_head.register_forward_hook(lambda module, inputs, output: output * 1.5)
    with pytest.raises(ConfigError, match=r"got .* nats a token between them for LlamaForCausalLM"):
        Actor(model).check_forward(tolerance=1e-3)


def test_a_model_whose_tokens_see_what_follows_is_refused():
    settings = dict(GEMMA, use_bidirectional_attention=True)
    model = transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**settings))
    with pytest.raises(ConfigError, match="each token must see only what came before it; got Gemma3ForCausalLM"):
        Actor(model)


@pytest.mark.parametrize(("eos", "expected"), [(2, (2,)), ([2, 5], (2, 5)), (None, ())])
def test_where_generation_stops_is_read_from_its_configuration(tmp_path, eos, expected):
    assert stop_token_ids(str(tmp_path)) == ()
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    assert stop_token_ids(str(tmp_path)) == expected
