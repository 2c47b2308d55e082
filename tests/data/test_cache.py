"""The cache: made once, complete or not there, keyed by everything that changes the tokens."""

import json
import multiprocessing
import os
import signal
import tempfile
import time
from pathlib import Path

import pytest
import transformers

from openkto.data.cache import cache_key, cached_folder, default_cache_dir
from openkto.errors import ConfigError, DataError
from tests.tokenizers_for_tests import CHAT_TEMPLATE, byte_tokenizer


def build(folder: Path) -> None:
    (folder / "rows.arrow").write_text("rows")
    (folder / "report.json").write_text("{}")


def build_for_ever(folder: Path) -> None:
    (folder / "report.json").write_text("{")
    time.sleep(120)


def test_a_complete_folder_is_not_built_again(tmp_path):
    folders = []

    def counting(folder: Path) -> None:
        folders.append(folder)
        build(folder)

    assert cached_folder(tmp_path, "k", counting) == cached_folder(tmp_path, "k", counting) == tmp_path / "k"
    assert len(folders) == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["k"]


def test_a_preparation_that_fails_leaves_nothing(tmp_path):
    def failing(folder: Path) -> None:
        (folder / "report.json").write_text("{}")
        raise DataError("no")

    with pytest.raises(DataError):
        cached_folder(tmp_path, "k", failing)
    assert list(tmp_path.iterdir()) == []


def test_a_preparation_that_is_killed_leaves_nothing_that_is_used(tmp_path):
    process = multiprocessing.get_context("spawn").Process(target=cached_folder, args=(tmp_path, "k", build_for_ever))
    process.start()
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("*/report.json")) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert not (tmp_path / "k").exists()
    assert (cached_folder(tmp_path, "k", build) / "rows.arrow").read_text() == "rows"
    assert [entry.name for entry in tmp_path.iterdir()] == ["k"]  # and what it left is gone


DAMAGES = {
    "one flipped bit": lambda folder: (folder / "rows.arrow").write_bytes(b"rowr"),
    "an empty report": lambda folder: (folder / "report.json").write_text(""),
    "no report": lambda folder: (folder / "report.json").unlink(),
    "no rows": lambda folder: (folder / "rows.arrow").unlink(),
    "no hashes": lambda folder: (folder / "hashes.json").unlink(),
    "hashes that are no JSON": lambda folder: (folder / "hashes.json").write_bytes(b"\xff"),
    "hashes of nothing": lambda folder: (folder / "hashes.json").write_text("{}"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_what_is_damaged_is_made_again_and_said(tmp_path, damage, caplog):
    folder = cached_folder(tmp_path, "k", build)
    damage(folder)
    assert cached_folder(tmp_path, "k", build) == folder
    assert (folder / "rows.arrow").read_text() == "rows"
    assert caplog.messages == [f"warning: {folder}: the cached rows are damaged, and are made again"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["k"]
    cached_folder(tmp_path, "k", build_for_ever)  # it is as it was written, and no more is made


def winning(folder: Path) -> None:
    (folder / "rows.arrow").write_text("the winner's")
    (folder / "report.json").write_text("{}")


def test_who_loses_the_race_uses_the_winner_s(tmp_path):
    def losing(folder: Path) -> None:
        build(folder)
        cached_folder(tmp_path, "k", winning)  # another process is done first

    assert (cached_folder(tmp_path, "k", losing) / "rows.arrow").read_text() == "the winner's"
    assert [entry.name for entry in tmp_path.iterdir()] == ["k"]


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError) as caught:
        cached_folder(tmp_path / "file", "k", build)
    assert str(caught.value) == (
        f"data_cache_dir: must be a folder that can be read and written; got {tmp_path}/file (File exists)."
        " Pass --data_cache_dir FOLDER with room for the tokenised rows."
    )


def test_the_folder_comes_from_the_environment_or_the_home(monkeypatch):
    monkeypatch.setenv("OPENKTO_CACHE", "/some/where")
    assert default_cache_dir() == Path("/some/where")
    monkeypatch.delenv("OPENKTO_CACHE")
    assert default_cache_dir() == Path.home() / ".cache" / "openkto"


def with_setting(**settings):
    """Return the tokenizer as its files say, with a setting more in tokenizer_config.json."""
    with tempfile.TemporaryDirectory() as folder:
        byte_tokenizer().save_pretrained(folder)
        file = Path(folder) / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | settings))
        return transformers.AutoTokenizer.from_pretrained(folder)


def test_the_key_is_of_data_tokenizer_template_and_settings():
    settings = {"on_bad_rows": "error"}
    keys = [
        cache_key(["a"], byte_tokenizer(), settings),
        cache_key(["b"], byte_tokenizer(), settings),
        cache_key(["a", "a"], byte_tokenizer(), settings),
        cache_key(["a"], byte_tokenizer(), {"on_bad_rows": "skip"}),
        cache_key(["a"], byte_tokenizer(bos="on"), settings),
        cache_key(["a"], byte_tokenizer(merges=(("a", "b"),)), settings),
        cache_key(["a"], byte_tokenizer(pad="eos"), settings),
        cache_key(["a"], byte_tokenizer(chat_template=CHAT_TEMPLATE + " "), settings),
        cache_key(["a"], with_setting(split_special_tokens=True), settings),
        cache_key(["a"], with_setting(add_prefix_space=True), settings),
        cache_key(["a"], with_setting(legacy=False), settings),
        cache_key(["a"], with_setting(a_setting_of_tomorrow=1), settings),
    ]
    assert len(set(keys)) == len(keys)


def test_the_key_does_not_change_with_where_a_tokenizer_lies():
    assert cache_key(["a"], with_setting(), {}) == cache_key(["a"], with_setting(), {})


def test_the_key_does_not_change_with_a_tokenizer_s_use():
    tokenizer = byte_tokenizer()
    key = cache_key(["a"], tokenizer, {})
    tokenizer(["a", "bc"], padding=True, truncation=True, max_length=8)
    assert cache_key(["a"], tokenizer, {}) == key == cache_key(["a"], byte_tokenizer(), {})
