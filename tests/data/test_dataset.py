"""The dataset as the trainer sees it: row numbers, counts, truncation, mixing, bad rows, preview."""

import json
import logging
import pickle
import subprocess
import sys
import time
from dataclasses import asdict
from typing import get_args

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from openkto.data.dataset import UnpairedPreferenceDataset
from openkto.data.notes import INFORMATION, WARNINGS, Note
from openkto.errors import ConfigError, DataError
from tests.helpers.datasets import dataset_of
from tests.tokenizers_for_tests import BOS, CHAT_TEMPLATE, EOS, byte_tokenizer, metaspace_tokenizer


def rows(desirable: int, undesirable: int, start: int = 0) -> list[dict]:
    total = desirable + undesirable
    return [{"prompt": f"p{start + n}", "completion": f" c{start + n}", "label": n < desirable} for n in range(total)]


def pairs(count: int) -> list[dict]:
    return [{"prompt": f"p{n}", "chosen": f" good{n}", "rejected": f" bad{n}"} for n in range(count)]


def make(source, max_len=64, tokenizer=None, **settings) -> UnpairedPreferenceDataset:
    return dataset_of(source, tokenizer or byte_tokenizer(chat_template=None), max_len, **settings)


def error_of(source, **settings) -> str:
    with pytest.raises(DataError) as caught:
        make(source, **settings)
    return str(caught.value)


def texts(dataset: UnpairedPreferenceDataset) -> list[tuple[str, str, bool]]:
    found = [dataset[i] for i in range(len(dataset))]
    decode = dataset.tokenizer.decode
    return [(decode(row["prompt_ids"]), decode(row["completion_ids"]), row["label"]) for row in found]


def test_a_row_has_ids_mask_label_and_number(write_lines):
    tokenizer = byte_tokenizer(bos="on", chat_template=None)
    dataset = make(write_lines(rows(1, 1)), tokenizer=tokenizer)
    assert len(dataset) == 2
    assert dataset[1] == {
        "row": 1,
        "prompt_ids": tokenizer("p1")["input_ids"],
        "completion_ids": [*tokenizer(" c1", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id],
        "completion_mask": [True] * 4,
        "label": False,
        "weight": 1.0,
    }
    assert (dataset.bos_token_id, dataset.pad_token_id) == (tokenizer.bos_token_id, tokenizer.pad_token_id)


def test_its_name_is_that_of_its_sources(write_lines):
    paths = [write_lines(rows(1, 1), "a.jsonl"), write_lines(rows(1, 1), "b.jsonl")]
    assert make(paths).name == f"{paths[0]}, {paths[1]}"
    assert make(rows(1, 1)).name == "rows"


def test_the_arrays_agree_with_the_rows(write_lines):
    dataset = make([write_lines(rows(2, 3), "a.jsonl"), write_lines(pairs(2), "b.jsonl")])
    found = [dataset[i] for i in range(len(dataset))]
    assert dataset.rows.tolist() == [row["row"] for row in found] == list(range(9))
    assert dataset.labels.tolist() == [row["label"] for row in found]
    assert dataset.prompt_lengths.tolist() == [len(row["prompt_ids"]) for row in found]
    assert dataset.completion_lengths.tolist() == [len(row["completion_ids"]) for row in found]
    assert dataset.labels.dtype == bool
    assert (dataset.rows.dtype, dataset.prompt_keys.dtype) == (np.int64, np.int64)
    assert (dataset.prompt_lengths.dtype, dataset.completion_lengths.dtype) == (np.int32, np.int32)


def test_prompt_keys_are_equal_where_prompts_are(write_lines):
    dataset = make([write_lines(pairs(2), "a.jsonl"), write_lines(rows(2, 1), "b.jsonl")])
    assert dataset.prompt_keys.tolist() == [0, 0, 1, 1, 0, 1, 2]


def test_the_last_scored_token_of_each_row_is_found(write_lines):
    dataset = make([write_lines(rows(1100, 0), "a.jsonl"), write_lines(pairs(2), "b.jsonl")])
    found = [dataset[i] for i in range(len(dataset))]
    scored = [[t for t, m in zip(r["completion_ids"], r["completion_mask"], strict=True) if m] for r in found]
    assert dataset.last_scored_ids().tolist() == [ids[-1] for ids in scored]


def test_completion_keys_are_equal_where_completions_are(write_lines):
    answers = ["yes", "no", "yes", "yes ", "no"]
    found = [{"prompt": f"question {i}", "completion": a, "label": i % 2 == 0} for i, a in enumerate(answers)]
    dataset = make(write_lines(found), max_len=14)  # cut, the completions are all equal
    assert dataset.completion_keys.tolist() == [0, 1, 0, 2, 1]
    assert dataset.completion_keys.dtype == np.int64


def test_all_containers_give_the_same_rows(tmp_path, write_lines):
    data = rows(2, 2)
    table = pa.Table.from_pylist(data)
    write_lines(data, "a.jsonl")
    (tmp_path / "a.json").write_text(json.dumps(data))
    (tmp_path / "a.csv").write_text(
        "prompt,completion,label\n" + "".join(f"{r['prompt']},{r['completion']},{r['label']}\n" for r in data)
    )
    pq.write_table(table, tmp_path / "a.parquet")
    with pa.ipc.new_file(str(tmp_path / "a.arrow"), table.schema) as writer:
        writer.write_table(table)
    datasets.Dataset.from_list(data).save_to_disk(str(tmp_path / "saved"))
    expected = texts(make(data))
    for name in ("a.jsonl", "a.json", "a.csv", "a.parquet", "a.arrow", "saved"):
        assert texts(make(tmp_path / name)) == expected, name


def test_row_numbers_count_all_inputs_before_filtering_and_max_samples(write_lines):
    bad = {"prompt": "x", "completion": "", "label": True}
    first = write_lines([bad, *rows(2, 2)], "a.jsonl")
    second = write_lines([pairs(1)[0], {"prompt": "x", "chosen": "y", "rejected": ""}, *pairs(2)], "b.jsonl")
    third = write_lines(rows(1, 1), "c.jsonl")
    dataset = make([first, second, third], max_samples=3, on_bad_rows="skip")
    assert dataset.rows.tolist() == [1, 2, 5, 6, 9, 10, 13, 14]
    assert dataset.report.rows_read == 3 + 6 + 2
    assert dataset.report.skipped == {"empty completion": 2}


def test_what_lies_beyond_max_samples_may_be_broken(write_lines):
    first = write_lines([*rows(1, 1), "{broken", '"no object"'], "a.jsonl")
    dataset = make([first, write_lines(rows(1, 0), "b.jsonl")], max_samples=2)
    assert dataset.rows.tolist() == [0, 1, 4]
    assert dataset.report.findings == [f"{first}: only its first 2 records are read (--max_samples)"]
    last = make(write_lines([*rows(1, 1), "{broken"], "c.jsonl"), max_samples=2)
    assert last.report.findings[0].endswith("c.jsonl: only its first 2 records are read (--max_samples)")
    assert make(write_lines(rows(1, 1), "d.jsonl"), max_samples=2).report.findings == []


def test_the_first_bad_row_is_named_also_where_a_later_one_is_found_sooner(write_lines):
    path = write_lines([*rows(1, 1), {"prompt": "\ud800", "completion": "b", "label": True}, "{broken"])
    assert error_of(path).startswith(f"{path}:3: the text must be valid Unicode; got half a surrogate pair")


def test_skip_drops_bad_rows_and_says_how_many_of_which_kind(write_lines, caplog):
    bad = [
        {"prompt": "x", "completion": "", "label": True},
        {"prompt": "x", "completion": "  ", "label": True},
        {"prompt": "x", "completion": "y", "label": "maybe"},
        "{broken",
        {"prompt": None, "completion": "y", "label": True},
    ]
    path = write_lines([*rows(1, 1), *bad, *rows(2, 0)])
    with caplog.at_level(logging.WARNING):
        dataset = make(path, on_bad_rows="skip")
    assert dataset.rows.tolist() == [0, 1, 7, 8]
    assert dataset.report.skipped == {"empty completion": 2, "label": 1, "broken JSON": 1, "null": 1}
    assert f"data: skipped 2 bad rows (empty completion). The first: {path}:3: the completion must not be empty" in (
        caplog.text
    )


def test_the_skipped_rows_are_said_again_from_the_cache(write_lines, caplog):
    path = write_lines([*rows(1, 1), "{broken"])
    make(path, on_bad_rows="skip")
    with caplog.at_level(logging.WARNING):
        make(path, on_bad_rows="skip")
    assert "skipped 1 bad row (broken JSON)" in caplog.text


def test_an_error_is_an_error_again_after_skip(write_lines):
    path = write_lines([*rows(1, 1), "{broken"])
    make(path, on_bad_rows="skip")
    assert error_of(path).startswith(f"{path}:3: must be one JSON object")


def test_a_bad_first_row_does_not_hide_the_format(write_lines):
    path = write_lines(["{broken", {"nothing": 1}, *pairs(2)])
    dataset = make(path, on_bad_rows="skip")
    assert dataset.rows.tolist() == [4, 5, 6, 7]
    assert dataset.report.skipped == {"broken JSON": 1, "missing field": 1}


def test_nothing_left_is_an_error_that_names_the_first(write_lines):
    path = write_lines(["{broken", {"prompt": "x", "completion": "", "label": True}])
    assert error_of(path, on_bad_rows="skip").startswith(
        f"{path}: at least one row must be left; got 1 bad row (broken JSON), 1 bad row (empty completion)."
        f" The first bad row: {path}:1: must be one JSON object"
    )
    assert "--on_bad_rows" not in error_of(path, on_bad_rows="skip")


def test_a_wrong_encoding_is_an_error_also_with_skip(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(json.dumps(rows(1, 1)[0]).encode() + b"\n\xff\n")
    assert error_of(path, on_bad_rows="skip").startswith(f"{path}:2: must be UTF-8 text")


def test_counts_are_of_the_converted_labels(write_lines, caplog):
    with caplog.at_level(logging.INFO):
        dataset = make(write_lines([{**row, "label": "good" if row["label"] else "bad"} for row in rows(3, 5)]))
    assert (dataset.report.desirable, dataset.report.undesirable) == (3, 5)
    assert "data: 8 rows: 3 desirable, 5 undesirable" in caplog.text
    assert "rows/s" in caplog.text


LONG = [
    {"prompt": "p" * 4, "completion": "c" * 3, "label": True},  # 8 tokens with EOS
    {"prompt": "p" * 4, "completion": "c" * 5, "label": True},  # 10
    {"prompt": "p" * 4, "completion": "c" * 4, "label": False},  # 9
    {"prompt": "p" * 8, "completion": "c", "label": False},  # 10, and no room for an answer
]


@pytest.mark.parametrize(
    ("truncation", "kept", "cut", "left_out"),
    [
        ("completion", [0, 1, 2], (1, 1), (0, 1)),
        ("prompt", [0, 1, 2, 3], (1, 2), (0, 0)),
        ("drop", [0], (0, 0), (1, 2)),
    ],
)
def test_cut_and_left_out_rows_are_counted_by_class(caplog, truncation, kept, cut, left_out):
    with caplog.at_level(logging.INFO):
        dataset = make(LONG, max_len=8, truncation=truncation)
    assert dataset.rows.tolist() == kept
    assert (dataset.report.cut_desirable, dataset.report.cut_undesirable) == cut
    assert (dataset.report.left_out_desirable, dataset.report.left_out_undesirable) == left_out
    assert (f"data: cut at max_len 8: {cut[0]} desirable, {cut[1]} undesirable rows" in caplog.text) == any(cut)
    warned = "warning: data: left out, too long for max_len 8: "
    warned += f"{left_out[0]} desirable, {left_out[1]} undesirable rows; "
    assert (f"{warned}raise --max_len, or change --truncation" in caplog.text) == any(left_out)


@pytest.mark.parametrize("truncation", ["completion", "prompt", "drop"])
def test_every_matched_and_mismatched_pair_fits_as_planned(truncation):
    dataset = make(LONG, max_len=9, truncation=truncation, tokenizer=byte_tokenizer(bos="on", chat_template=None))
    for i in range(len(dataset)):
        for j in range(len(dataset)):
            prompt, completion = dataset[i]["prompt_ids"], dataset[j]
            ids = dataset.cut(prompt, completion["completion_ids"], completion["completion_mask"])
            planned = dataset.cut_lengths(dataset.prompt_lengths[[i]], dataset.completion_lengths[[j]])
            assert len(ids[0]) + len(ids[1]) == planned[0] <= 9
            assert len(ids[1]) == len(ids[2]) >= 1
            assert ids[0][0] == dataset.bos_token_id


def test_a_cut_completion_has_no_eos():
    dataset = make(LONG, max_len=8)
    row = dataset[1]
    assert row["completion_ids"][-1] == dataset.tokenizer.eos_token_id  # stored uncut
    _, completion, _ = dataset.cut(row["prompt_ids"], row["completion_ids"], row["completion_mask"])
    assert dataset.tokenizer.eos_token_id not in completion


def test_length_is_in_tokens():
    tokenizer = byte_tokenizer(merges=(("a", "a"), ("aa", "aa"), ("aaaa", "aaaa")), chat_template=None)
    dataset = make([{"prompt": "x", "completion": "a" * 24, "label": True}], max_len=8, tokenizer=tokenizer)
    assert dataset.completion_lengths.tolist() == [4]
    assert dataset.report.cut_desirable == 0


def test_no_row_that_fits_is_an_error():
    assert error_of(LONG[3:], max_len=8) == (
        "rows: at least one row must fit max_len 8 with --truncation completion; got none of 1 rows:"
        " the shortest has 10 tokens, the median 10, and the shortest prompt 8."
        " Raise --max_len, or change --truncation."
    )


def test_max_len_and_mixing_do_not_tokenise_again(write_lines, cache_dir):
    sources = [write_lines(rows(2, 2), "a.jsonl"), write_lines(rows(1, 1), "b.jsonl")]
    make(sources)
    make(sources, max_len=10, truncation="drop")
    make(sources, dataset_probs=[0.5, 0.5], seed=3)
    assert len(list(cache_dir.iterdir())) == 1
    make(sources, max_samples=1)
    assert len(list(cache_dir.iterdir())) == 2


def test_labels_flipped_in_the_cache_are_never_trained_on(write_lines, cache_dir, caplog):
    path = write_lines(rows(2, 2))
    labels = make(path).labels.tolist()
    (file,) = cache_dir.glob("*/rows.arrow")
    with pa.OSFile(str(file), "rb") as source, pa.ipc.open_stream(source) as reader:
        table = reader.read_all()
    column = table.schema.get_field_index("label")
    flipped = table.set_column(column, table.schema.field(column), pc.invert(table["label"]))
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(flipped)
    assert make(path).labels.tolist() == labels
    assert f"warning: {file.parent}: the cached rows are damaged, and are made again" in caplog.messages


def test_mixing_draws_as_interleave_datasets_does_and_repeats_row_numbers(write_lines):
    sources = [write_lines(rows(2, 1), "a.jsonl"), write_lines(rows(10, 10, start=50), "b.jsonl")]
    dataset = make(sources, dataset_probs=[0.5, 0.5], seed=7)
    expected = datasets.interleave_datasets(
        [datasets.Dataset.from_dict({"row": list(range(3))}), datasets.Dataset.from_dict({"row": list(range(3, 23))})],
        probabilities=[0.5, 0.5],
        seed=7,
        stopping_strategy="all_exhausted",
    )["row"]
    assert dataset.rows.tolist() == list(expected)
    assert set(dataset.rows.tolist()) == set(range(23))
    assert len(dataset) > 23
    assert dataset.report.kept == len(dataset) == dataset.report.desirable + dataset.report.undesirable


@pytest.mark.parametrize("probs", [[1.0], [0.5, 0.2, 0.3], [1.0, 0.0], [-1.0, 2.0]])
def test_probabilities_must_fit_the_datasets(write_lines, probs):
    sources = [write_lines(rows(1, 1), "a.jsonl"), write_lines(rows(1, 1), "b.jsonl")]
    with pytest.raises(ConfigError, match="dataset_probs: must"):
        make(sources, dataset_probs=probs)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"max_len": 2}, "max_len: must be at least 3 (BOS, prompt and completion token); got 2. Raise it."),
        (
            {"input_template": "Q:"},
            "input_template: must hold {} once, where the prompt goes; got 'Q:' with 0. Correct",
        ),
        ({"input_template": "{}{}"}, "input_template: must hold {} once"),
        (
            {"input_template": "{}", "apply_chat_template": True},
            "input_template: cannot go with --apply_chat_template, which wraps the prompt too; got both.",
        ),
    ],
)
def test_settings_that_cannot_be_are_errors(settings, says):
    with pytest.raises(ConfigError) as caught:
        make(rows(1, 1), **settings)
    assert says in str(caught.value)


def test_pickling_keeps_the_rows(write_lines):
    dataset = make(write_lines(rows(2, 2)))
    copy = pickle.loads(pickle.dumps(dataset))
    assert [copy[i] for i in range(4)] == [dataset[i] for i in range(4)]


def test_a_tokenizer_without_pad_is_said_once_and_not_changed(caplog):
    tokenizer = byte_tokenizer(pad="none")
    with caplog.at_level(logging.INFO):
        dataset = make(rows(1, 1), tokenizer=tokenizer)
    assert caplog.text.count("the tokenizer has no pad token: eos_token (id") == 1
    assert tokenizer.pad_token is None
    assert dataset.pad_token_id == tokenizer.eos_token_id


def test_the_report_is_json(write_lines):
    report = json.loads(json.dumps(asdict(make(write_lines(rows(2, 3))).report)))
    assert (report["rows_read"], report["desirable"], report["undesirable"]) == (5, 2, 3)


def test_what_was_special_is_counted_and_said(caplog):
    data = [
        {"prompt": "a t", "completion": "he", "label": True},
        {"prompt": "a " + EOS, "completion": " b", "label": False},
    ]
    with caplog.at_level(logging.INFO):
        report = make(data, tokenizer=metaspace_tokenizer()).report
    assert (report.merged, report.special_markup, report.template_differs) == (1, 1, 0)
    assert "data: 1 row: the tokenizer merges over the boundary" in caplog.text
    assert "data: 1 row: a text holds the markup of a special token" in caplog.text


def test_the_preview_shows_given_labels_and_the_exact_completion():
    data = [*rows(2, 2), {"prompt": "p" * 60, "completion": " cccc", "label": True}]
    dataset = make(data, max_len=63, tokenizer=byte_tokenizer(bos="on", chat_template=None))
    assert dataset.preview(1) == (
        f"row 0: desirable, prompt 3 tokens, completion 4 tokens, 4 of them scored\n{BOS}p0⟦ c0{EOS}⟧\n\n"
        f"row 2: undesirable, prompt 3 tokens, completion 4 tokens, 4 of them scored\n{BOS}p2⟦ c2{EOS}⟧"
    )
    assert dataset.preview(3).endswith(
        "row 4: desirable, prompt 61 tokens, completion 2 tokens, 2 of them scored, cut by 4 to max_len 63\n"
        f"{BOS}{'p' * 60}⟦ c⟧"
    )
    assert "\x1b[31m⟦ c2</s>⟧\x1b[0m" in dataset.preview(1, has_colour=True)


def test_the_preview_leaves_a_tool_s_result_unmarked():
    turns = [("user", "q"), ("assistant", "look"), ("tool", "42"), ("assistant", "it is")]
    messages = [{"role": role, "content": content} for role, content in turns]
    rows_of_messages = [{"prompt": messages[:1], "completion": messages[1:], "label": True}]
    dataset = make(rows_of_messages, max_len=512, tokenizer=byte_tokenizer())
    assert "\n⟦look<|end|>⟧\n<|start|>tool\n42<|end|>\n<|start|>assistant\n⟦it is<|end|>⟧" in dataset.preview(1)


def test_twenty_thousand_short_rows_take_seconds(write_lines):
    path = write_lines(
        [{"prompt": f"What is {n}?", "completion": f" About {n}.", "label": n % 2 == 0} for n in range(20_000)]
    )
    started = time.process_time()
    assert len(make(path)) == 20_000
    assert time.process_time() - started < 20  # of its own time: other tests run beside this one


def test_each_text_is_tokenised_in_batches_and_not_at_all_from_the_cache(write_lines, monkeypatch):
    tokenizer = byte_tokenizer()
    sizes: list[int] = []
    encode = type(tokenizer).__call__

    def counting(self, text, *args, **kwargs):
        sizes.append(len(text) if isinstance(text, list) else 1)
        return encode(self, text, *args, **kwargs)

    monkeypatch.setattr(type(tokenizer), "__call__", counting)
    path = write_lines(rows(1000, 1000))
    make(path, tokenizer=tokenizer)
    assert sizes.count(1000) == 4
    assert sum(sizes) < 4000 + 20
    sizes.clear()
    make(path, tokenizer=tokenizer)
    assert sizes == []


def test_the_data_package_imports_without_torch():
    code = "import sys, openkto.data.dataset; assert 'torch' not in sys.modules; assert 'deepspeed' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_weights_come_from_the_data_and_are_part_of_the_fingerprint(write_lines):
    def weighted(*weights):
        lines = [row | {"w": weight} for row, weight in zip(rows(2, 1), weights, strict=True)]
        return make(write_lines(lines), weight_key="w")

    dataset = weighted(0.5, 0, 2)
    assert dataset.weights.tolist() == [dataset[i]["weight"] for i in range(3)] == [0.5, 0.0, 2.0]
    assert "weight 0.5" in dataset.preview(1)
    assert dataset.fingerprint() != weighted(0.5, 0, 3).fingerprint()
    assert make(write_lines(rows(2, 1))).weights.tolist() == [1.0, 1.0, 1.0]


def test_a_bad_weight_is_named_by_file_and_line_or_skipped(write_lines):
    lines = [row | {"w": weight} for row, weight in zip(rows(2, 1), (1, -1, 1), strict=True)]
    path = write_lines(lines)
    assert error_of(path, weight_key="w").startswith(
        f"{path}:2: w, the row's weight, must be a number, 0 or more; got -1. "
    )
    assert make(path, weight_key="w", on_bad_rows="skip").report.skipped == {"weight": 1}


def test_weights_of_zero_alone_are_an_error(write_lines):
    path = write_lines([row | {"w": 0} for row in rows(1, 1)])
    assert error_of(path, weight_key="w") == (
        f"{path}: at least one row must weigh more than 0; got 0 for all. Correct the weights."
    )


def test_what_became_of_text_prompts_and_fields_nobody_reads_are_counted_and_said(caplog):
    data = [{**row, "source": "desk"} for row in rows(2, 1)]
    data.append({"prompt": "Is it?", "completion": "Is it? Yes.", "label": True})
    with caplog.at_level(logging.INFO):
        report = make(data, tokenizer=byte_tokenizer()).report
    assert (report.notes, report.unread) == ({"wrapped": 4, "repeats the prompt": 1}, ["source"])
    assert "data: 4 rows: the prompt is a plain text and goes through the chat template" in caplog.text
    assert "warning: data: 1 row: the completion begins with its own prompt" in caplog.text
    assert "data: fields that are not read: source" in caplog.text
    assert "the model sees the prompts without it" not in caplog.text
    make([{**row, "History": [["Hi", "Hello"]]} for row in rows(1, 1)])
    said = "warning: data: History: not read, so the model sees the prompts without it; put it into messages."
    assert said in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert make(data, tokenizer=byte_tokenizer(), apply_chat_template=False).report.notes["left plain"] == 4
    assert "stays one although the tokenizer has a chat template" in caplog.text


def test_every_note_has_its_sentence():
    kinds = set(get_args(Note))
    assert WARNINGS.keys() | INFORMATION.keys() == kinds
    assert not WARNINGS.keys() & INFORMATION.keys()


def test_arguments_for_the_template_ends_and_a_printed_date_make_rows_of_their_own(cache_dir):
    def folders() -> int:
        return len(list(cache_dir.iterdir()))

    dated = byte_tokenizer(chat_template="{{ strftime_now('%Y') }}{{ tone }}" + CHAT_TEMPLATE)
    for tokenizer, grows in ((byte_tokenizer(), (0, 1, 1)), (dated, (1, 1, 1))):
        make(rows(1, 1), tokenizer=tokenizer, template_date="2024-02-03")
        before = folders()
        for settings, growth in zip(
            ({"template_date": "2025-02-03"}, {"chat_template_kwargs": {"tone": "x"}}, {"end_token_ids": [1]}),
            grows,
            strict=True,
        ):
            make(rows(1, 1), tokenizer=tokenizer, **{"template_date": "2024-02-03", **settings})
            assert folders() == before + growth
            before = folders()
    shown = make(
        rows(1, 1), max_len=99, tokenizer=dated, template_date="2025-02-03", chat_template_kwargs={"tone": "x"}
    )
    assert shown.preview(1).splitlines()[1].startswith("2025x<|start|>")


def test_no_row_that_was_skipped_is_answered_with_the_advice_to_skip_it():
    others = "{% for m in messages %}{% if m.role != 'system' %}{{ m.content }}{% endif %}{% endfor %}"
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi?"}]
    good = rows(2, 2)
    sources = {
        "label": [*good, {**good[0], "label": "perhaps"}],
        "label of another convention": [*good, {**good[0], "label": "yes"}],
        "missing field": [*good, {"prompt": "p", "label": True}],
        "text left out": [{**row, "prompt": chat[1:]} for row in good] + [{**good[0], "prompt": chat}],
    }
    for found in sources.values():
        tokenizer = byte_tokenizer(chat_template=others)
        report = make(found, tokenizer=tokenizer, on_bad_rows="skip", apply_chat_template=False).report
        assert sum(report.skipped.values()) == 1
        assert "on_bad_rows" not in next(iter(report.first_skipped.values()))
