"""A full disk, a folder or bytes that are no text in the place of a run's small files: said, and in nobody's way."""

import os
import re
from pathlib import Path

import pytest

from openkto.commands import convert_checkpoint, merge_lora
from openkto.commands.folder import write_run_file
from openkto.config import RunConfig
from openkto.config.flags import parse
from openkto.distributed import checkpoint_folder as layout
from openkto.errors import ConfigError
from openkto.report.records import METRICS, RecordFile, go_back
from tests.text_rows import write_model

NO_TEXT = b"\xff\xfe\x00step"


@pytest.fixture
def config(tmp_path) -> RunConfig:
    return parse(["--pretrain", "m", "--dataset", "rows.jsonl", "--save_path", str(tmp_path)], "train")[0]


def put(path: Path, what: str) -> None:
    if what == "a folder":
        path.mkdir()
        (path / "mine.txt").write_text("mine")
    else:
        path.write_bytes(NO_TEXT)


# ---- run.yaml -------------------------------------------------------------------------------------------------------


def test_a_full_disk_costs_run_yaml_and_nothing_else(tmp_path, config, caplog):
    (tmp_path / "run.yaml").write_text("beta: 0.3\n")
    (tmp_path / "run.yaml.part").symlink_to("/dev/full")
    write_run_file(config, tmp_path)
    assert caplog.messages == [
        f"warning: {tmp_path}/run.yaml: could not be written (No space left on device); the run continues without it."
    ]
    assert sorted(os.listdir(tmp_path)) == ["run.yaml"]
    assert (tmp_path / "run.yaml").read_text() == "beta: 0.3\n"


@pytest.mark.parametrize("what", ["a folder", "no text"])
def test_what_stands_in_the_place_of_run_yaml_is_kept_under_a_number(tmp_path, config, what):
    put(tmp_path / "run.yaml", what)
    write_run_file(config, tmp_path)
    assert "pretrain: m" in (tmp_path / "run.yaml").read_text()
    (kept,) = (path for path in tmp_path.iterdir() if path.name != "run.yaml")
    content = (kept / "mine.txt").read_bytes() if what == "a folder" else kept.read_bytes()
    assert content == (b"mine" if what == "a folder" else NO_TEXT)


# ---- pointers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["a folder", "no text"])
@pytest.mark.parametrize("pointer", layout.POINTERS)
def test_what_stands_in_the_place_of_a_pointer_names_nothing_and_is_replaced(tmp_path, pointer, what):
    put(tmp_path / pointer, what)
    assert layout.pointed_to(tmp_path, pointer) is None
    assert layout.finished_files(tmp_path) is None
    layout.point_to(tmp_path, pointer, "global_step3")
    assert layout.pointed_to(tmp_path, pointer) == "global_step3"
    kept = [path for path in tmp_path.iterdir() if path.name != pointer]
    assert [(path / "mine.txt").read_text() for path in kept] == (["mine"] if what == "a folder" else [])


# ---- metrics.jsonl --------------------------------------------------------------------------------------------------


def test_metrics_that_are_no_text_are_kept_aside_and_lines_among_them_carried_on(tmp_path, caplog):
    line = b'{"kind": "train", "step": 1}\n'
    (tmp_path / METRICS).write_bytes(line + NO_TEXT + b"\n")
    go_back(tmp_path, 1, {"train": 1}, train_lines=1)
    assert (tmp_path / METRICS).read_bytes() == line
    (said,) = caplog.messages
    (aside,) = (path for path in tmp_path.iterdir() if path.name != METRICS)
    assert f"line 2 is none. It is kept as {aside.name}" in said
    assert aside.read_bytes() == line + NO_TEXT + b"\n"


def test_a_folder_in_the_place_of_the_metrics_is_one_sentence(tmp_path):
    put(tmp_path / METRICS, "a folder")
    go_back(tmp_path, 1, {}, train_lines=None)
    expected = f"--save_path: must be a folder that can be written; got '{tmp_path}' ({METRICS}: Is a directory). "
    with pytest.raises(ConfigError, match=re.escape(expected)):
        RecordFile(tmp_path / METRICS)


# ---- a model that is there already ----------------------------------------------------------------------------------


def refusal(main, *argv: str) -> str:
    with pytest.raises(ConfigError) as error:
        main(list(argv))
    return str(error.value)


@pytest.mark.parametrize(("sign", "kind"), [("config.json", "a model"), ("adapter_config.json", "an adapter")])
def test_merging_and_converting_replace_no_model_unless_they_are_told_to(tmp_path, sign, kind):
    base, out, adapter = write_model(tmp_path / "model"), tmp_path / "out", tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(f'{{"base_model_name_or_path": "{base}", "peft_type": "LORA"}}')
    out.mkdir()
    (out / sign).write_text("{}")
    expected = (
        f"--save_path: must not hold a model already; got {out} with {kind}. Name another folder, or pass "
        "--overwrite to replace it."
    )
    merge = ["--pretrain", str(adapter), "--save_path", str(out)]
    convert = ["--pretrain", str(base), "--save_path", str(out), "--load_checkpoint", f"{tmp_path}/nothing"]
    assert refusal(merge_lora.main, *merge) == expected
    assert refusal(convert_checkpoint.main, *convert) == expected
    assert sorted(os.listdir(out)) == [sign]
    # With --overwrite both go on to what is wrong next.
    with pytest.raises(Exception, match="adapter"):
        merge_lora.main([*merge, "--overwrite"])
    with pytest.raises(Exception, match="must hold a DeepSpeed checkpoint"):
        convert_checkpoint.main([*convert, "--overwrite"])
