"""Uploading a model: found out before training whether it can work, only the model's own files, and nothing is lost."""

import getpass
import json
import re
import socket
from pathlib import Path

import pytest
import transformers
from huggingface_hub import constants

from openkto.commands import merge_lora, push, train
from openkto.commands.push import check_push
from openkto.config import OutputConfig
from openkto.config.flags import parse
from openkto.errors import ConfigError
from openkto.models.hub import model_files
from tests.helpers.commands import flags, run_to_status, status
from tests.helpers.hub_server import KEY, READ_ONLY, TEAM, USER, running_hub, use_hub
from tests.ranks import run_ranks


@pytest.fixture
def hub(monkeypatch):
    for name in ("ENDPOINT", "HF_HUB_OFFLINE", "HF_HUB_DISABLE_XET"):
        monkeypatch.setattr(constants, name, getattr(constants, name))  # to be as they were afterwards
    monkeypatch.setenv("HF_TOKEN", KEY)
    with running_hub() as running:
        use_hub(running.address)
        yield running


def write_adapter(folder: Path, base: str = "/home/jane/models/base") -> Path:
    """Write the files of an adapter, none of them with weights to speak of, and what else a run leaves."""
    folder.mkdir(parents=True)
    header = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (folder / "adapter_model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": base}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"name_or_path": "/home/jane/t", "eos_token": "</s>"}))
    (folder / "README.md").write_text(
        '---\nlibrary_name: "peft"\n---\n![A plot](training.png)\nload("path/to/this/folder")\n'
    )
    (folder / "training.png").write_bytes(b"\x89PNG")
    for name in ("metrics.jsonl", "run.yaml", "rewards.jsonl", "samples.jsonl", "report.html", "notes.py"):
        (folder / name).write_text("a row's text, or /home/jane")
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints/model.safetensors").write_text("large")
    return folder


# ---- the command -----------------------------------------------------------------------------------------------------


def test_push_uploads_the_models_own_files_into_a_private_repository(hub, tmp_path):
    folder = write_adapter(tmp_path / "out")
    push.main([str(folder), "support"])
    name = f"{USER}/support"
    assert hub.is_private == {name: True}
    files = hub.files[name]
    assert sorted(files) == [
        *("README.md", "adapter_config.json", "adapter_model.safetensors", "tokenizer_config.json", "training.png"),
    ]
    assert files["adapter_model.safetensors"] == (folder / "adapter_model.safetensors").read_bytes()
    # A folder of this machine is named by its last part, there but not here.
    assert json.loads(files["adapter_config.json"])["base_model_name_or_path"] == "base"
    assert json.loads(files["tokenizer_config.json"]) == {"name_or_path": "t", "eos_token": "</s>"}
    assert b"/home/jane/models/base" in (folder / "adapter_config.json").read_bytes()
    assert f'load("{name}")'.encode() in files["README.md"]


def test_a_second_upload_replaces_what_the_first_had_of_a_model_and_leaves_the_rest(hub, tmp_path):
    name = f"{TEAM}/support"
    hub.make(name, private=True)
    hub.files[name] = {"model-00001-of-00002.safetensors": b"old", "LICENSE": b"mine", "adapter_config.json": b"old"}
    push.main([str(write_adapter(tmp_path / "out")), name, "--public"])
    assert "model-00001-of-00002.safetensors" not in hub.files[name]
    assert hub.files[name]["LICENSE"] == b"mine"
    assert b"LORA" in hub.files[name]["adapter_config.json"]
    assert hub.is_private == {name: True}  # whoever made it decides


def test_public_is_a_word_of_its_own(hub, tmp_path):
    push.main([str(write_adapter(tmp_path / "out")), "support", "--public"])
    assert hub.is_private == {f"{USER}/support": False}


def test_a_folder_without_a_whole_model_is_not_uploaded(hub, tmp_path, capsys):
    code, text = status(push.main, [str(tmp_path), "support"], capsys)
    assert (code, hub.requests) == (2, [])
    assert f"{tmp_path}: must be a folder with a model or an adapter; got none there." in text
    folder = write_adapter(tmp_path / "out")
    (folder / "adapter_model.safetensors").write_bytes(b"cut")
    code, text = status(push.main, [str(folder), "support"], capsys)
    assert (code, hub.requests) == (2, [])
    assert "got one of which adapter_model.safetensors is cut or damaged" in text


def test_a_models_own_code_and_templates_go_with_it(tmp_path):
    folder = write_adapter(tmp_path / "out")
    assert "notes.py" not in model_files(folder)
    (folder / "config.json").write_text('{"auto_map": {"AutoModel": "modeling_own.Own"}}')
    (folder / "modeling_own.py").write_text("")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/rag.jinja").write_text("")
    assert {"modeling_own.py", "additional_chat_templates/rag.jinja"} <= set(model_files(folder))


def test_an_upload_that_fails_says_why_and_what_to_do(hub, tmp_path, capsys):
    folder, hub.is_full = write_adapter(tmp_path / "out"), True
    code, text = status(push.main, [str(folder), "support"], capsys)
    assert code == 1
    assert (
        f"error: {USER}/support: the model must be uploaded there; got status 403 (Private repository storage limit "
        f"reached). Mend that, and run the same command again; {folder} is as it was."
    ) in text


# ---- what is found out before ----------------------------------------------------------------------------------------


def test_what_would_not_work_is_said_before_training(hub, monkeypatch):
    hub.make(f"{USER}/seen", private=False)

    def said(name="support", public=False) -> str:
        with pytest.raises(ConfigError) as caught:
            check_push(OutputConfig(push_to_hub=name, hub_public=public), makes=True)
        return str(caught.value)

    assert said("other/support") == (
        f"--push_to_hub: must name a repository of {USER} or {TEAM}, whose key this is; got other/support. Correct "
        "the name, or take another key."
    )
    assert f"got {USER}/seen, which is there and everyone sees" in said("seen")
    assert check_push(OutputConfig(push_to_hub="seen", hub_public=True), makes=True) == f"{USER}/seen"
    monkeypatch.setenv("HF_TOKEN", READ_ONLY)
    assert "--push_to_hub: needs a key that may write; got one that may only read." in said()
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "--push_to_hub: the Hub must know the key; got status 401 (" in (wrong := said())
    assert "hf_wrong" not in wrong
    assert wrong.endswith("Set HF_TOKEN to a key that may write, or run `hf auth login`.")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "got HF_HUB_OFFLINE=1, which keeps it from being asked. Unset it, or leave the upload for later" in said()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
        assert (unreachable := said()).startswith("--push_to_hub: the Hub must know the key; got ConnectError (")
        assert unreachable.endswith(
            "Check the network and try again, or leave the upload for later: `openkto push` does it."
        )
        monkeypatch.setattr(constants, "ENDPOINT", hub.address)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/nowhere")
    cure = "Set HF_TOKEN to a key that may write, or run `hf auth login`."
    assert said() == f"--push_to_hub: needs a key for the Hub; got none. {cure}"
    assert set(hub.files) == {f"{USER}/seen"}


@pytest.mark.parametrize("name", ["true", "a b", "owner/name/more", "./out", "-x"])
def test_a_name_that_cannot_be_one_is_refused(name):
    argv = ["--pretrain", "m", "--dataset", "rows.jsonl", f"--push_to_hub={name}"]
    with pytest.raises(ConfigError, match="--push_to_hub: must be the name of a repository on the Hub"):
        parse(argv, "train")
    with pytest.raises(ConfigError, match="--hub_public: needs --push_to_hub; got none"):
        parse([*argv[:-1], "--hub_public"], "train")


def test_check_asks_the_hub_and_changes_nothing_there(hub, place, capsys, monkeypatch):
    code, text = status(train.main, flags(place, "--check", "--push_to_hub", "support"), capsys)
    assert code == 0, text
    assert ("GET", "/api/whoami-v2") in hub.requests
    assert hub.files == {}
    monkeypatch.setenv("HF_TOKEN", READ_ONLY)
    assert status(train.main, flags(place, "--check", "--push_to_hub", "support"), capsys)[0] == 2


# ---- at the end of a run ---------------------------------------------------------------------------------------------


def train_with(address: str, argv: list[str]) -> tuple[int, str]:
    use_hub(address)
    return run_to_status(argv)


def merge_with(address: str, argv: list[str]) -> tuple[int, str]:
    use_hub(address)
    return run_to_status(argv, merge_lora.main)


def test_a_key_that_may_not_write_ends_the_run_before_it_trains(hub, place, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", READ_ONLY)
    said = run_ranks(train_with, 2, place, hub.address, flags(place, "--push_to_hub", "support"))
    assert [code for code, _ in said] == [2, 2]
    assert "--push_to_hub: needs a key that may write" in said[0][1]
    assert not (place / "out/metrics.jsonl").exists()


def test_a_run_uploads_its_adapter_at_its_end_and_a_failed_upload_loses_nothing(hub, place):
    argv = flags(place, "--lora_rank", "4", "--load_checkpoint", "--push_to_hub", "support")
    hub.is_full = True
    (code, text), (other, _) = run_ranks(train_with, 2, place, hub.address, argv)
    assert (code, other) == (1, 0)
    assert (
        f"error: {USER}/support: the model must be uploaded there; got status 403 (Private repository storage limit "
        f"reached). Nothing is lost: the model is complete in {place}/out. Upload it with `openkto push {place}/out "
        "support`."
    ) in text
    assert hub.files == {f"{USER}/support": {}}  # made before training
    hub.is_full = False
    # The same command again: nothing is left to do but this.
    (code, text), _ = run_ranks(train_with, 2, place, hub.address, argv)
    assert code == 0, text
    files = hub.files[f"{USER}/support"]
    assert files["adapter_model.safetensors"] == (place / "out/adapter_model.safetensors").read_bytes()
    argv = ["--pretrain", f"{place}/out", "--save_path", f"{place}/whole", "--push_to_hub", f"{TEAM}/whole"]
    ((code, text),) = run_ranks(merge_with, 1, place, hub.address, argv)
    assert code == 0, text
    whole = place / "downloaded"
    whole.mkdir()
    for name, content in hub.files[f"{TEAM}/whole"].items():
        (whole / name).write_bytes(content)
    assert transformers.AutoModelForCausalLM.from_pretrained(whole)
    assert f'from_pretrained("{TEAM}/whole"'.encode() in (whole / "README.md").read_bytes()
    check_tells_nothing(hub, place)


def check_tells_nothing(hub, place: Path) -> None:
    """See that nothing sent holds a key, a path, the names of user and host, or a row."""
    secrets = (str(place), f"-of-{getpass.getuser()}", KEY, "is odd", "even?", "/tmp")
    host = re.compile(rf"\b{re.escape(socket.gethostname())}\b".encode())
    uploaded = {f"{name}/{file}": content for name, files in hub.files.items() for file, content in files.items()}
    assert len(uploaded) > 12
    for place_of, content in (uploaded | dict(enumerate(hub.bodies))).items():
        found = [secret for secret in secrets if secret.encode() in content]
        assert not found, f"{place_of} holds {found}"
    for file, content in uploaded.items():
        if not file.endswith((".safetensors", ".png")):  # whose bytes may be a short name by chance
            assert not host.search(content), file
