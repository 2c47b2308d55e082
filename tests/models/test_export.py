"""What is saved is what was loaded, with new weights; a disk that is full is said before the run and loses nothing."""

import collections
import json
import os
import shutil

import pytest
import torch
import transformers
from safetensors import SafetensorError

from openkto.config import LoraConfig
from openkto.errors import ConfigError, OpenKTOError
from openkto.models import Actor, load_tokenizer
from openkto.models.export import check_space, export_model
from openkto.models.merging import merge_adapter
from tests.text_rows import byte_tokenizer, write_model


@pytest.fixture
def model(tmp_path):
    write_model(tmp_path / "base")
    return transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")


def export(model, folder, dtype=torch.float32):
    weights = {name: tensor.to(dtype) + 1 for name, tensor in model.state_dict().items()}
    export_model(model, weights, byte_tokenizer(), folder, dtype, {"attention_dropout": 0.25})


def test_the_export_has_the_given_weights_and_dtype(model, tmp_path):
    export(model, tmp_path / "out", torch.bfloat16)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert loaded.dtype == torch.bfloat16
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name].bfloat16() + 1)
    assert loaded.config.attention_dropout == 0.25  # as it was loaded, not as it was trained
    assert model.dtype == torch.float32


def test_a_generation_config_that_transformers_refuses_is_kept(model, tmp_path):
    model.generation_config.do_sample = False
    model.generation_config.temperature = 0.3
    export(model, tmp_path / "out")
    saved = json.loads((tmp_path / "out/generation_config.json").read_text())
    assert saved["temperature"] == 0.3


def test_a_write_that_fails_leaves_the_earlier_export_whole(model, tmp_path, monkeypatch):
    export(model, tmp_path / "out")
    (tmp_path / "out/model_of_mine.safetensors").touch()
    before = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}

    def full(*args, **kwargs):
        raise SafetensorError("I/O error: No space left on device")

    monkeypatch.setattr(type(model), "save_pretrained", full)
    with pytest.raises(
        OpenKTOError, match=r"cannot save the model; got SafetensorError: .*No space left on device. Free some"
    ):
        export(model, tmp_path / "out")
    assert {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()} == before


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_all_files_have_the_permissions_of_any_new_file(model, tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        export(model, tmp_path / "out")
    finally:
        os.umask(before)
    assert {file.name: file.stat().st_mode & 0o777 for file in (tmp_path / "out").iterdir()} == {
        name: mode for name in os.listdir(tmp_path / "out")
    }


def test_an_export_goes_over_an_earlier_one_with_folders_and_shards(model, tmp_path, monkeypatch):
    out = tmp_path / "out"
    export(model, out)
    (out / "model-00001-of-00002.safetensors").touch()
    (out / "folder").mkdir()
    (out / "folder/old").touch()
    save = transformers.PreTrainedTokenizerFast.save_pretrained

    def with_folder(self, folder):
        save(self, folder)
        (folder / "folder").mkdir()
        (folder / "folder/new").touch()

    monkeypatch.setattr(transformers.PreTrainedTokenizerFast, "save_pretrained", with_folder)
    export(model, out)
    assert os.listdir(out / "folder") == ["new"]
    assert not (out / "model-00001-of-00002.safetensors").exists()


def test_what_a_killed_export_left_is_deleted(model, tmp_path):
    (tmp_path / ".export-killed").mkdir()
    check_space(tmp_path, 1, torch.float32)
    assert not (tmp_path / ".export-killed").exists()
    (tmp_path / ".export-killed").mkdir()
    export(model, tmp_path)
    assert not (tmp_path / ".export-killed").exists()


def test_too_little_space_is_said_before_the_run(tmp_path, monkeypatch):
    usage = collections.namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(0, 0, 2**30))
    check_space(tmp_path, 2**28, torch.bfloat16)
    with pytest.raises(ConfigError, match=r"the model and its records need 1056 MiB; got 1024 MiB free"):
        check_space(tmp_path, 2**28, torch.float32)


@pytest.fixture
def older(tmp_path):
    """A model's folder as transformers 4 wrote it, with other names for the tokenizer's class, rope and dtype."""
    base = write_model(tmp_path / "older")
    change(base / "tokenizer_config.json", lambda c: c.pop("backend", None), tokenizer_class="PreTrainedTokenizerFast")
    rope = {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    change(
        base / "config.json", lambda c: c.pop("rope_parameters"), torch_dtype="float32", attention_dropout=0.5, **rope
    )
    change(base / "config.json", lambda c: c.pop("dtype"))
    change(base / "generation_config.json", lambda c: c, transformers_version="4.40.0", top_p=0.9)
    return base


def change(file, drop, **values):
    content = json.loads(file.read_text())
    drop(content)
    file.write_text(json.dumps(content | values))


def read(file):
    return json.loads(file.read_text())


def test_files_that_training_did_not_change_are_those_of_the_model_it_started_from(older, tmp_path):
    actor, tokenizer = Actor(str(older)), load_tokenizer(str(older))
    actor.export(actor.model.state_dict(), tokenizer, tmp_path / "out", torch.bfloat16)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "out" / name).exists() == (older / name).exists()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (older / name).read_bytes()
    assert read(tmp_path / "out/generation_config.json") == read(older / "generation_config.json")
    assert read(tmp_path / "out/config.json") == read(older / "config.json") | {"torch_dtype": "bfloat16"}
    theirs, ours = (transformers.AutoModelForCausalLM.from_pretrained(f).config for f in (older, tmp_path / "out"))
    assert ours.rope_parameters == theirs.rope_parameters


def test_what_is_changed_is_written_and_all_else_kept(older, tmp_path):
    actor, tokenizer = Actor(str(older)), load_tokenizer(str(older))
    tokenizer.add_tokens(["another"])
    actor.stop_also_at([7])
    actor.model.config.tie_word_embeddings = True
    actor.export(actor.model.state_dict(), tokenizer, tmp_path / "out", torch.float32)
    assert "another" in load_tokenizer(str(tmp_path / "out")).get_vocab()
    changed = {"eos_token_id": [2, 7]}
    assert read(tmp_path / "out/generation_config.json") == read(older / "generation_config.json") | changed
    assert read(tmp_path / "out/config.json") == read(older / "config.json") | {"tie_word_embeddings": True}


def test_an_export_needs_no_folder_that_is_gone(older, tmp_path):
    actor, tokenizer = Actor(str(older)), load_tokenizer(str(older))
    shutil.rmtree(older)
    actor.export(actor.model.state_dict(), tokenizer, tmp_path / "out", torch.float32)
    assert load_tokenizer(str(tmp_path / "out")).chat_template
    assert read(tmp_path / "out/config.json")["rope_parameters"]["rope_theta"] == 500000.0


def test_an_adapters_tokenizer_is_copied_and_its_stops_reach_the_merged_model(older, tmp_path):
    actor = Actor(str(older), lora=LoraConfig(lora_rank=2))
    actor.stop_also_at([7])
    weights = {name: p.detach() for name, p in actor.model.named_parameters() if p.requires_grad}
    tokenizer = load_tokenizer(str(older))
    actor.export(weights, tokenizer, tmp_path / "out", torch.float32)
    assert (tmp_path / "out/tokenizer_config.json").read_bytes() == (older / "tokenizer_config.json").read_bytes()
    (tmp_path / "whole").mkdir()
    merge_adapter(str(tmp_path / "out"), tokenizer, tmp_path / "whole", None)
    assert read(tmp_path / "whole/generation_config.json")["eos_token_id"] == [2, 7]
    assert read(tmp_path / "whole/config.json") == read(older / "config.json")
