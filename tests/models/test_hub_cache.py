"""A model by its Hub name: fetched before it is hashed, and one hash whatever else lies in the Hub's cache."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import constants

from openkto.config import LoraConfig, ModelConfig, policy_name, ref_is_adapter, reference_name
from openkto.errors import ConfigError
from openkto.models import Actor, fingerprint
from openkto.models.adapter import base_of
from openkto.models.fingerprint import fetch, model_fingerprint
from openkto.models.loading import load_config, load_model, load_tokenizer, stop_token_ids
from openkto.models.revision import split_revision
from openkto.models.tokenizer_file import check_ids
from tests.text_rows import write_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """An empty cache, laid out as huggingface_hub lays it, beside a model; no network."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    model = write_model(tmp_path / "model")
    snapshot = tmp_path / "hub/models--some--model/snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot.parent.parent / "blobs").mkdir()
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs/main").write_text(COMMIT)
    return SimpleNamespace(model=model, snapshot=snapshot)


def bring(hub, *names):
    """Put files into the cache as a download does: a blob, and a link to it."""
    for name in names:
        blob = hub.snapshot.parent.parent / "blobs" / f"blob-of-{name}"
        shutil.copy(hub.model / name, blob)
        (hub.snapshot / name).symlink_to(Path("../../blobs") / blob.name)


def test_a_cached_model_has_the_hash_of_its_folder_whatever_else_is_fetched(hub):
    bring(hub, "config.json", "model.safetensors")
    fetch(["some/model"])
    assert model_fingerprint("some/model") == model_fingerprint(str(hub.model))
    (hub.snapshot / "pytorch_model.bin").write_bytes(b"the same weights for another library")
    (hub.snapshot / "consolidated.safetensors").write_bytes(b"and in another layout")
    assert model_fingerprint("some/model") == model_fingerprint(str(hub.model))


def test_shards_are_those_that_the_index_names(hub):
    (hub.model / "model.safetensors").rename(hub.model / "model-00001-of-00001.safetensors")
    (hub.model / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00001-of-00001.safetensors"}}')
    bring(hub, "config.json", "model.safetensors.index.json")
    with pytest.raises(
        ConfigError, match=r"got no model-00001-of-00001\.safetensors there, and the Hub cannot be asked"
    ):
        fetch(["some/model"])
    bring(hub, "model-00001-of-00001.safetensors")
    fetch(["some/model"])
    assert model_fingerprint("some/model") == model_fingerprint(str(hub.model))


@pytest.mark.parametrize("there", [(), ("config.json",)])
def test_a_model_that_is_not_whole_in_the_cache_is_no_model_to_hash(hub, there):
    bring(hub, *there)
    with pytest.raises(
        ConfigError, match="some/model: must be a model's folder, or be on the Hub or whole in its local"
    ):
        fetch(["some/model"])


def test_only_what_is_loaded_is_fetched_and_before_anything_is_hashed(hub, monkeypatch):
    listed = ["config.json", "README.md", "model.safetensors", "pytorch_model.bin", "original/consolidated.00.pth"]
    listed += ["model.onnx", "consolidated.safetensors"]

    def download(name, revision, allow_patterns):
        bring(hub, *(file for file in listed if file in allow_patterns))
        return str(hub.snapshot)

    monkeypatch.setattr(fingerprint.HfApi, "list_repo_files", lambda self, name, revision: listed)
    monkeypatch.setattr(fingerprint, "snapshot_download", download)
    bring(hub, "config.json")  # as reading the configuration leaves it
    (hub.snapshot / "config.json").unlink()
    fetch(["some/model"])
    assert sorted(file.name for file in hub.snapshot.iterdir()) == ["config.json", "model.safetensors"]
    assert model_fingerprint("some/model") == model_fingerprint(str(hub.model))


OLDER = "89abcdef0123456789abcdef0123456789abcdef"


@pytest.fixture
def two_versions(hub):
    """A model of which the cache holds two versions that differ in weights, template and stops: main and a tag."""
    bring(hub, *(file.name for file in hub.model.iterdir()))
    older = hub.snapshot.parent / OLDER
    shutil.copytree(hub.model, older)
    (hub.snapshot.parent.parent / "refs/v1.0").write_text(OLDER)
    model = load_model(str(older))
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(2)
    model.save_pretrained(older)
    (older / "generation_config.json").write_text('{"eos_token_id": [1, 3]}')
    config = json.loads((older / "config.json").read_text())
    config["torch_dtype"] = config.pop("dtype")  # the older spelling, which an export keeps
    (older / "config.json").write_text(json.dumps(config))
    (older / "chat_template.jinja").write_text("{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}")
    return SimpleNamespace(newest=hub.snapshot, older=older)


@pytest.mark.parametrize("revision", ["v1.0", OLDER])
def test_a_revision_is_what_is_loaded_hashed_and_written_out(two_versions, revision, tmp_path):
    name = f"some/model@{revision}"
    fetch([name])
    assert model_fingerprint(name) == model_fingerprint(str(two_versions.older)) != model_fingerprint("some/model")
    head, other = (load_model(one).get_output_embeddings().weight for one in (name, "some/model"))
    assert torch.equal(head, 2 * other)
    assert stop_token_ids(name) == (1, 3) != stop_token_ids("some/model")
    tokenizer = load_tokenizer(name)
    assert tokenizer.chat_template.startswith("{% for m in messages %}[{{")
    assert tokenizer.name_or_path == name
    assert check_ids(name) == two_versions.older / "tokenizer.json"
    actor = Actor(name)
    actor.export(actor.model.state_dict(), tokenizer, tmp_path / "out", torch.float32)
    assert json.loads((tmp_path / "out/generation_config.json").read_text())["eos_token_id"] == [1, 3]
    assert (tmp_path / "out/chat_template.jinja").read_text() == tokenizer.chat_template
    written = (tmp_path / "out/config.json").read_text()
    assert json.loads(written)["torch_dtype"] == "float32"
    assert revision not in written


def test_an_adapter_names_its_base_models_revision_and_is_put_on_it_again(two_versions, tmp_path):
    actor = Actor("some/model@v1.0", lora=LoraConfig(lora_rank=2))
    actor.export(actor.model.state_dict(), load_tokenizer("some/model@v1.0"), tmp_path / "adapter", torch.float32)
    known = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert (known["base_model_name_or_path"], known["revision"]) == ("some/model", "v1.0")
    assert base_of(str(tmp_path / "adapter")) == "some/model@v1.0"
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        got = Actor(str(tmp_path / "adapter")).model(ids).logits
        torch.testing.assert_close(got, load_model(str(two_versions.older))(ids).logits)


def test_a_revision_that_the_cache_lacks_is_refused_with_its_name(two_versions):
    with pytest.raises(ConfigError, match="some/model@v9: cannot load the model: there is no such folder here, and"):
        load_config("some/model@v9")
    with pytest.raises(ConfigError, match="some/model@v9: must be a model's folder, or be on the Hub or whole in its"):
        fetch(["some/model@v9"])


def test_names_are_taken_apart_where_they_are_the_hubs(tmp_path):
    assert split_revision("owner/name@refs/pr/3") == ("owner/name", "refs/pr/3")
    assert split_revision("gpt2@main") == ("gpt2", "main")
    (tmp_path / "at@home").mkdir()
    for plain in ("owner/name", str(tmp_path / "at@home"), "/gone/at@home", "./at@home"):
        assert split_revision(plain) == (plain, None)


@pytest.mark.parametrize(
    ("given", "policy", "reference", "is_one"),
    [
        ({"revision": "v1"}, "o/m@v1", "o/m@v1", True),
        ({"revision": "v1", "ref_pretrain": "o/m"}, "o/m@v1", "o/m@v1", True),
        ({"revision": "v1", "ref_pretrain": "o/n"}, "o/m@v1", "o/n", False),
        ({"ref_revision": "v0"}, "o/m", "o/m@v0", False),
        ({"revision": "v1", "ref_revision": "v0"}, "o/m@v1", "o/m@v0", False),
        ({"revision": "v1", "ref_pretrain": "o/n", "ref_revision": "v2"}, "o/m@v1", "o/n@v2", False),
    ],
)
def test_the_reference_is_of_the_policys_revision_where_nothing_else_is_said(given, policy, reference, is_one):
    model = ModelConfig(pretrain="o/m", **given)
    assert (policy_name(model), reference_name(model)) == (policy, reference)
    assert ref_is_adapter(model, has_adapter=True) == is_one
