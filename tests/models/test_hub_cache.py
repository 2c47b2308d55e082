"""A model by its Hub name: fetched before it is hashed, and one hash whatever else lies in the Hub's cache."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import constants

from openkto.errors import ConfigError
from openkto.models import fingerprint
from openkto.models.fingerprint import fetch, model_fingerprint
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

    def download(name, allow_patterns):
        bring(hub, *(file for file in listed if file in allow_patterns))
        return str(hub.snapshot)

    monkeypatch.setattr(fingerprint.HfApi, "list_repo_files", lambda self, name: listed)
    monkeypatch.setattr(fingerprint, "snapshot_download", download)
    bring(hub, "config.json")  # as reading the configuration leaves it
    (hub.snapshot / "config.json").unlink()
    fetch(["some/model"])
    assert sorted(file.name for file in hub.snapshot.iterdir()) == ["config.json", "model.safetensors"]
    assert model_fingerprint("some/model") == model_fingerprint(str(hub.model))
