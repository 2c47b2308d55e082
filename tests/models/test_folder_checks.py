"""Strangers' files: what a library would hang, crash or go wrong on without a word is one sentence, or as they say."""

import fnmatch
import json
import os
import time

import pytest
import transformers

from openkto.config import LoraConfig
from openkto.errors import ConfigError
from openkto.models import load_tokenizer
from openkto.models.adapter import add_lora, load_adapter
from openkto.models.fingerprint import model_fingerprint
from openkto.models.folder_checks import check_files, check_tokenizer_files
from openkto.models.hub import model_files
from openkto.models.loading import load_config, load_model
from openkto.models.model_files import EXPORTED, TOKENIZER_FILES
from tests.text_rows import write_model
from tests.tiny import tiny_llama


@pytest.fixture
def folder(tmp_path):
    return write_model(tmp_path / "model")


def refusal(call, *arguments) -> str:
    with pytest.raises(ConfigError) as error:
        call(*arguments)
    message = str(error.value)
    assert "\n" not in message
    return message


FILES = [
    *("model-00002.safetensors", "tokenizer.model", "generation_config.json", "chat_template.jinja"),
    "additional_chat_templates/tools.jinja",
]


def change(file, **values):
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("call", [load_config, load_tokenizer])
def test_a_named_pipe_among_the_files_is_refused_not_waited_for(folder, name, call):
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    assert refusal(call, str(folder)) == (
        f"{folder / name}: a model's files must be plain files; got a named pipe. Remove it."
    )


@pytest.mark.parametrize("call", [load_config, load_tokenizer])
def test_weights_that_are_not_whole_are_refused_before_anything_else_is_done(folder, call):
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    (folder / "consolidated.safetensors").write_bytes(content[:-1])  # which transformers does not read
    call(str(folder))
    for part in (content[:-1], content[:100], b""):
        weights.write_bytes(part)
        assert refusal(call, str(folder)) == (
            f"{weights}: must hold all of its weights; got a file of {len(part)} bytes that is cut or damaged. "
            "Download or copy it again."
        )
    weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 12345\n")
    assert refusal(call, str(folder)) == (
        f"{weights}: must hold all of its weights; got a pointer of Git LFS. Run `git lfs pull` in that folder."
    )


def test_a_device_behind_a_link_is_refused_and_what_nobody_reads_is_not(folder):
    os.mkfifo(folder / "control")
    load_config(str(folder))
    (folder / "model-00002.safetensors").symlink_to("/dev/zero")
    assert "got a device" in refusal(load_config, str(folder))


def test_a_file_that_cannot_be_read_is_named(folder, monkeypatch):
    (folder / "model-00002.safetensors").symlink_to(folder / "gone")
    gone = f"{folder}: the model's files must be readable; got {folder}/model-00002.safetensors (No such file"
    assert refusal(load_config, str(folder)).startswith(gone)
    assert refusal(model_fingerprint, str(folder)).startswith(gone)


@pytest.mark.parametrize("method", ["gptq", "awq", "fp8", "mxfp4", "compressed-tensors"])
def test_a_quantized_checkpoint_is_refused_from_its_configuration(folder, method):
    change(folder / "config.json", quantization_config={"quant_method": method, "bits": 4, "group_size": 128})
    (folder / "model.safetensors").unlink()
    assert f"must be unquantized, as training changes its weights; got one quantized by {method} (" in refusal(
        load_config, str(folder)
    )


def test_weights_that_the_configuration_has_no_place_for_are_named_and_counted(folder, caplog):
    change(folder / "config.json", num_hidden_layers=1)
    load_model(str(folder))
    (warning,) = [message for message in caplog.messages if message.startswith("warning: ")]
    assert warning == (
        f"warning: {folder}: the weights' files hold 9 tensors that its configuration has no place for, such as "
        "model.layers.1.input_layernorm.weight; they are left out. Compare config.json with the model's own."
    )


@pytest.fixture
def adapter(tmp_path):
    adapted = add_lora(tiny_llama(), LoraConfig(lora_rank=2))
    adapted.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


@pytest.mark.parametrize(
    "values",
    [
        {"target_modules": r"(\w+\.?)+!"},
        {"rank_pattern": {r"(\w+\.?)+!": 4}},
        {"target_modules": "((("},
    ],
)
def test_a_pattern_that_explodes_in_an_adapter_is_refused_in_time(adapter, values, monkeypatch):
    monkeypatch.setattr("openkto.models.adapter.match_in_time.__defaults__", (0.2,))
    change(adapter / "adapter_config.json", **values)
    started = time.process_time()
    message = refusal(load_adapter, tiny_llama(), str(adapter))
    assert "adapter_config.json must name modules by expressions that can be matched; got " in message
    assert time.process_time() - started < 5


def test_a_pattern_that_serves_is_taken(adapter):
    change(adapter / "adapter_config.json", target_modules=r".*\.(q|k|v|o|gate|up|down)_proj")
    assert load_adapter(tiny_llama(), str(adapter)).peft_config["default"].r == 2


def test_a_pipe_in_an_adapters_folder_is_refused(adapter):
    os.mkfifo(adapter / "adapter_model.bin")
    assert "got a named pipe" in refusal(load_config, str(adapter))


# ---- tokenizers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["vocab", "added"])
def test_an_id_beyond_all_bounds_is_refused(folder, place):
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    if place == "vocab":
        content["model"]["vocab"]["zz"] = 2**32 - 6
    else:
        content["added_tokens"][-1]["id"] = 2**32 - 6
    file.write_text(json.dumps(content))
    assert "the tokenizer's ids must be below 16777216; got 4294967290 in tokenizer.json" in refusal(
        load_tokenizer, str(folder)
    )


def with_own_parts(folder):
    """Give the model a tokenizer that has other parts than the class that its configuration names."""
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    content["pre_tokenizer"] = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    vocabulary = content["model"]["vocab"]
    content["model"]["merges"] = [["2", "0"], ["2", "3"], ["20", "23"]]
    for token in ("20", "23", "2023"):
        vocabulary[token] = len(vocabulary)
    file.write_text(json.dumps(content))
    change(folder / "tokenizer_config.json", tokenizer_class="Qwen2Tokenizer")
    return vocabulary


def test_a_models_own_tokenizer_is_read_as_its_file_says(folder, tmp_path, caplog):
    caplog.set_level("INFO")
    vocabulary = with_own_parts(folder)
    replaced = transformers.AutoTokenizer.from_pretrained(folder)
    assert len(replaced("2023")["input_ids"]) == 4
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer("2023")["input_ids"] == [vocabulary["2023"]]
    assert tokenizer.chat_template == replaced.chat_template
    (said,) = caplog.messages
    assert said == (
        f"{folder}: the tokenizer is read as its tokenizer.json says; transformers' Qwen2Tokenizer has another "
        "normalizer and pre_tokenizer"
    )
    tokenizer.save_pretrained(tmp_path / "out")
    parts = [json.loads((place / "tokenizer.json").read_text()) for place in (folder, tmp_path / "out")]
    for name in ("normalizer", "pre_tokenizer", "decoder"):
        assert parts[0][name] == parts[1][name]


def test_a_tokenizer_that_is_its_files_is_left_as_it_is(folder, caplog):
    caplog.set_level("INFO")
    assert type(load_tokenizer(str(folder))) is type(transformers.AutoTokenizer.from_pretrained(folder))
    assert caplog.messages == []


@pytest.mark.parametrize(
    "name", ["tekken.json", "tokenizer.model.v3", "vocab.txt", "sentencepiece.bpe.model", "bpe.codes", "own.tiktoken"]
)
def test_a_tokenizers_file_is_known_by_its_name_read_with_care_and_goes_with_the_model(tmp_path, name):
    (tmp_path / "config.json").write_text("{}")
    refusal(check_tokenizer_files, str(tmp_path))
    (tmp_path / name).touch()
    check_tokenizer_files(str(tmp_path))
    assert name in model_files(tmp_path)
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    assert "got a named pipe" in refusal(check_files, str(tmp_path))


def test_a_tokenizers_file_that_an_export_may_leave_is_one_that_it_copies():
    beside = (
        "config.json",
        "generation_config.json",
        "adapter_config.json",
        "model.",
        "model-",
        "pytorch_",
        "adapter_",
    )
    names = [name for name in EXPORTED if not name.startswith(beside)]
    assert "tekken.json" in names
    for name in names:
        assert any(fnmatch.fnmatch(name.partition("/")[0], pattern) for pattern in TOKENIZER_FILES), name
