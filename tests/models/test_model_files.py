"""Which files make a model, and whether they are whole."""

import pytest
import torch
from safetensors.torch import save_file

from openkto.models.model_files import CARD_MARK, exported_files, kind_of_model, problem_with_model, remove_exported


@pytest.fixture
def folder(tmp_path):
    save_file({"w": torch.ones(50), "v": torch.ones(7)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("mine")
    return tmp_path


def damaged(file, how):
    content = file.read_bytes()
    if how == "deleted":
        file.unlink()
    else:
        file.write_bytes({"empty": b"", "cut": content[:-1], "zeros": bytes(len(content))}[how])


@pytest.mark.parametrize("how", ["deleted", "empty", "cut", "zeros"])
@pytest.mark.parametrize("is_written_down", [True, False])
def test_weights_that_are_gone_or_cut_are_noticed(folder, how, is_written_down):
    sizes = exported_files(folder) if is_written_down else None
    assert sizes is None or sizes.keys() == {"model.safetensors", "config.json", "tokenizer.json"}
    assert problem_with_model(folder, sizes) is None
    damaged(folder / "model.safetensors", how)
    assert problem_with_model(folder, sizes)


def test_a_file_beside_the_weights_that_is_gone_or_cut_is_named(folder):
    sizes = exported_files(folder)
    (folder / "tokenizer.json").write_text("")
    assert problem_with_model(folder, sizes) == "tokenizer.json has 0 bytes of 2"
    (folder / "tokenizer.json").unlink()
    assert problem_with_model(folder, sizes) == "tokenizer.json is missing"


def test_an_export_takes_the_place_of_all_that_an_earlier_one_left(folder):
    (folder / "additional_chat_templates").mkdir()
    others = ("tekken.json", "qwen.tiktoken", "additional_chat_templates/tool_use.jinja")
    for name in ("adapter_config.json", "model-00001-of-00002.safetensors", "chat_template.jinja", *others):
        (folder / name).write_text("")
    (folder / "README.md").write_text("---\nbase_model: x\nlibrary_name: peft\n---\n")
    remove_exported(folder, kept=set())
    assert [path.name for path in folder.rglob("*") if path.is_file()] == ["notes.txt"]
    (folder / "README.md").write_text(f"---\nlibrary_name: transformers\n---\n{CARD_MARK}\n")
    remove_exported(folder, kept=set())
    assert not (folder / "README.md").exists()  # of a model that is no longer there
    (folder / "README.md").write_text("my notes")
    remove_exported(folder, kept=set())
    assert (folder / "README.md").exists()


def test_what_lies_in_a_folder_is_named(folder, tmp_path):
    assert kind_of_model(folder) == "a model"
    (folder / "adapter_config.json").write_text("{}")
    assert kind_of_model(folder) == "an adapter"
    remove_exported(folder, kept=set())
    assert kind_of_model(folder) is None
