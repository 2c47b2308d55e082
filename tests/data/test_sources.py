"""What an item of --dataset may name, and the sentence for what is not there."""

import json

import datasets
import pytest

from openkto.data.dataset import UnpairedPreferenceDataset
from openkto.data.entries import read_entry
from openkto.data.problems import Findings
from openkto.data.sources import find_source, find_sources
from openkto.errors import ConfigError, DataError
from tests.helpers.datasets import dataset_of
from tests.text_rows import byte_tokenizer

ROWS = [{"prompt": "a", "completion": "b", "label": True}, {"prompt": "c", "completion": "d", "label": False}]


def places(source) -> list[str]:
    return [place for _, place, _ in source.records(Findings())]


def error_of(item, split="train") -> str:
    with pytest.raises(DataError) as caught:
        places(find_source(item, split))
    return str(caught.value)


def test_a_glob_is_sorted_by_name(tmp_path, write_lines):
    for name in ("b.jsonl", "a.jsonl", "c.jsonl"):
        write_lines(ROWS[:1], name)
    assert places(find_source(f"{tmp_path}/*.jsonl", "train")) == [f"{tmp_path}/{name}.jsonl:1" for name in "abc"]


def test_a_save_to_disk_folder_is_read(tmp_path):
    datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "saved"))
    source = find_source(tmp_path / "saved", "train")
    assert [value for _, _, value in source.records(Findings())] == ROWS
    assert places(source) == [f"{tmp_path}/saved:row 0", f"{tmp_path}/saved:row 1"]


def test_a_folder_with_splits_gives_the_one_that_is_asked_for(tmp_path):
    parts = {"train": datasets.Dataset.from_list(ROWS[:1]), "test": datasets.Dataset.from_list(ROWS)}
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "saved"))
    assert len(places(find_source(tmp_path / "saved", "test"))) == 2
    assert error_of(tmp_path / "saved", "dev") == (
        f"{tmp_path}/saved: must have the split 'dev'; got the splits train, test."
        " Pass --dataset_split or --eval_split."
    )


def test_a_folder_of_other_files_is_an_error(tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "model.bin").write_text("x")
    message = error_of(tmp_path / "other")
    assert message.startswith(f"{tmp_path}/other: a folder must hold data files, or have been written by datasets'")


def test_a_damaged_folder_is_one_sentence(tmp_path):
    datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "saved" / "state.json").write_text("{")
    assert error_of(tmp_path / "saved").startswith(f"{tmp_path}/saved: must be a readable save_to_disk folder; got ")


def test_a_missing_file_names_the_nearest(tmp_path, write_lines):
    write_lines(ROWS, "train.jsonl")
    write_lines(ROWS, "other.csv")
    assert error_of(tmp_path / "trian.jsonl") == (
        f"{tmp_path}/trian.jsonl: must be an existing file; got no such file."
        f" The nearest name there is {tmp_path}/train.jsonl."
    )
    assert error_of(tmp_path / "zzz").endswith("got no such file. Correct the name.")


def test_a_missing_folder_is_named(tmp_path):
    assert error_of(tmp_path / "no" / "a.jsonl") == (
        f"{tmp_path}/no/a.jsonl: must be an existing file; got a folder that does not exist, {tmp_path}/no."
        " Correct the path."
    )


def test_a_pattern_without_a_match_is_an_error(tmp_path):
    assert "must match at least one file; got no match." in error_of(f"{tmp_path}/*.jsonl")


def test_an_unknown_suffix_is_an_error(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    assert error_of(tmp_path / "a.txt") == (
        f"{tmp_path}/a.txt: a data file's name must end in one of .jsonl, .ndjson, .json, .csv, .tsv, .parquet, .arrow;"
        " text files also with .gz, .bz2, .xz, .zst behind; got '.txt'. Convert the file, or rename it"
        " if it is one of these."
    )
    (tmp_path / "a.xlsx").write_bytes(b"PK")
    assert error_of(tmp_path / "a.xlsx").endswith("got '.xlsx'. Save the table as CSV UTF-8.")


@pytest.mark.parametrize(
    ("name", "content"), [("a.jsonl", ""), ("a.jsonl", "\n\n"), ("a.json", "[]"), ("a.csv", "a,b\n")]
)
def test_a_file_without_rows_is_an_error(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    assert error_of(tmp_path / name) == (
        f"{tmp_path}/{name}: must hold at least one row; got none. Give it rows, or leave it out."
    )


@pytest.mark.parametrize("name", ["nobody/nothing-of-that-name", "nothing_of_that_name"])
def test_a_hub_name_that_cannot_be_loaded_is_one_sentence(monkeypatch, name):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    message = error_of(name)
    assert message.startswith(f"{name}: must be an existing file or a dataset on the hub with a split 'train'; got ")
    assert message.endswith("Correct the name, or --dataset_config for the subset, or pass a local file.")
    assert "\n" not in message


@pytest.mark.parametrize("name", ["./nothing", "/nothing/here", "a/b/c", "../x"])
def test_what_looks_like_a_path_is_never_looked_for_on_the_hub(name):
    assert "must be an existing file; got" in error_of(name)


def test_rows_may_be_given_as_a_list():
    (source,) = find_sources(ROWS, "train")
    assert places(source) == ["rows:row 0", "rows:row 1"]


def test_no_source_is_an_error():
    with pytest.raises(DataError, match="dataset: must name at least one file; got none"):
        find_sources([], "train")


def test_the_digest_is_of_the_content_wherever_it_lies(tmp_path, write_lines):
    first, second, other = write_lines(ROWS, "a.jsonl"), write_lines(ROWS, "b.jsonl"), write_lines(ROWS[:1], "c.jsonl")
    digests = [find_source(path, "train").digest() for path in (first, second, other)]
    assert digests[0] == digests[1] != digests[2]
    (tmp_path / "d.json").write_text(json.dumps(ROWS))
    assert find_source(tmp_path / "d.json", "train").digest() not in digests


def test_the_code_of_a_dataset_is_never_run(tmp_path, monkeypatch):
    folder = tmp_path / "script"
    folder.mkdir()
    (folder / "script.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'w')\n")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    error_of(folder)
    monkeypatch.chdir(tmp_path)
    error_of("script/script")
    error_of(folder / "script.py")
    assert not (tmp_path / "marker").exists()


def test_a_folder_downloaded_from_the_hub_is_read_by_its_names_or_its_readme(tmp_path):
    for name in (
        "data/train-00000-of-00002.jsonl",
        "data/train-00001-of-00002.jsonl",
        "data/test-00000-of-00001.jsonl",
    ):
        (tmp_path / "hub" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "hub" / name).write_text(json.dumps(ROWS[0]) + "\n")
    (tmp_path / "hub" / "README.md").write_text("---\n---\nA card.\n")
    assert len(places(find_source(tmp_path / "hub", "train"))) == 2
    assert len(places(find_source(tmp_path / "hub", "test"))) == 1
    assert "must have the split 'dev'; got the splits" in error_of(tmp_path / "hub", "dev")
    configs = (
        "configs:\n- config_name: a\n  data_files: data/test*.jsonl\n- config_name: b\n  data_files: data/*.jsonl\n"
    )
    (tmp_path / "hub" / "README.md").write_text(f"---\nlicense: mit\n{configs}---\nA card.\n")
    assert len(places(find_source(tmp_path / "hub", "train", "b"))) == 3
    assert error_of(tmp_path / "hub") == (
        f"{tmp_path}/hub: one of the subsets must be chosen; got the subsets a, b. Name one with --dataset_config."
    )


def test_an_empty_shard_is_left_out_and_said_but_not_empty_files_only(tmp_path, write_lines):
    write_lines(ROWS, "a.jsonl")
    (tmp_path / "b.jsonl").write_text("")
    findings = Findings()
    source = find_source(f"{tmp_path}/*.jsonl", "train")
    assert len(list(source.records(findings))) == 2
    assert findings.lines() == [f"{tmp_path}/b.jsonl: the file holds no rows"]
    (tmp_path / "a.jsonl").write_text("")
    assert "must hold at least one row; got none." in error_of(f"{tmp_path}/*.jsonl")


def test_an_entry_may_have_keys_of_its_own(write_lines, cache_dir):
    other = [{"q": "x", "completion": "y", "good": False}]
    paths = [write_lines(ROWS, "a.jsonl"), write_lines(other, "b.jsonl")]
    entry = json.dumps({"path": str(paths[1]), "input_key": "q", "label_key": "good"})
    dataset = UnpairedPreferenceDataset([str(paths[0]), entry], byte_tokenizer(), 512)
    assert dataset.labels.tolist() == [True, False, False]
    with pytest.raises(DataError, match="an entry must be a path, or a mapping of path and any of split, config"):
        find_sources(['{"path": "a", "labels": "x"}'], "train")


@pytest.mark.parametrize(
    ("own", "values", "labels"),
    [
        ({"label_map": {"great": "true", "awful": False, "meh": None}}, ["great", "awful", "meh"], [True, False]),
        ({"label_map": ["great=true", "awful=false"]}, ["great", "awful"], [True, False]),
        ({"label_threshold": "4"}, [5, 3], [True, False]),
        ({"label_threshold": [4, 2]}, ["5", "3", "1"], [True, False]),
    ],
)
def test_an_entry_may_read_labels_its_own_way(write_lines, cache_dir, own, values, labels):
    other = [{"prompt": "x", "completion": f"y{i}", "label": value} for i, value in enumerate(values)]
    paths = [write_lines(ROWS, "a.jsonl"), write_lines(other, "b.jsonl")]
    entry = json.dumps({"path": str(paths[1]), **own})
    dataset = UnpairedPreferenceDataset([str(paths[0]), entry], byte_tokenizer(), 512)
    assert dataset.labels.tolist() == [True, False, *labels]
    assert read_entry(entry).settings.keys() == {"label_map", "label_threshold"}  # either flag gives way
    flags = {"label_map": {"true": False, "false": True}, "label_threshold": ()}
    turned = dataset_of([str(paths[0]), entry], byte_tokenizer(), **flags)
    assert turned.labels.tolist() == [False, True, *labels]


@pytest.mark.parametrize(
    ("own", "sentence"),
    [
        ({"label_map": {"great": "perhaps"}}, "label_map of a: must be VALUE=true, VALUE=false or VALUE=none"),
        ({"label_threshold": "high"}, "label_threshold of a: must be one number, or two that differ; got high. Give"),
        ({"label_threshold": 4, "label_map": {"a": True}}, "an entry may have label_map or label_threshold; got both"),
        ({"label_key": 3}, "an entry must be a path, or a mapping of path and any of"),
        ({"name": "x"}, "an entry must be a path, or a mapping of path and any of"),
    ],
)
def test_a_wrong_setting_of_an_entry_is_named(own, sentence):
    with pytest.raises((DataError, ConfigError), match=sentence):
        find_sources([json.dumps({"path": "a", **own})], "train")
