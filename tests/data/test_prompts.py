"""Prompts for the policy to answer: which of a set's, how a file's are read, and what --max_len leaves of them."""

import json

import pytest

from openkto.data.dataset import UnpairedPreferenceDataset
from openkto.data.prompts import Prompt, fit_prompts, prompts_of_file, prompts_of_set
from openkto.data.row import RowSettings
from openkto.errors import DataError
from tests.text_rows import byte_tokenizer


def texts(prompts) -> list[str]:
    tokenizer = byte_tokenizer()
    return [tokenizer.decode(prompt.ids) for prompt in prompts]


def read(path, **settings) -> list[str]:
    return texts(prompts_of_file(str(path), byte_tokenizer(), RowSettings(**settings), None))


def test_prompts_of_a_set_are_spread_evenly_and_each_is_there_once(tmp_path):
    rows = [
        {"prompt": f"p{i}", "completion": f" {kind}", "label": kind == "good"}
        for i in range(10)
        for kind in ("good", "bad")
    ]
    rows = UnpairedPreferenceDataset(
        rows, byte_tokenizer(), row_settings=RowSettings(apply_chat_template=False), cache_dir=tmp_path
    )
    found = prompts_of_set("eval", rows, 4)
    assert texts(found) == ["p0", "p2", "p5", "p7"]
    assert all(prompt.label for prompt in found)
    assert byte_tokenizer().decode(found[0].completion_ids) == " good</s>"
    assert len(prompts_of_set("eval", rows, 99)) == 10
    assert prompts_of_set("eval", rows, 0) == []


RENDERED = "<|user|>Why?<|assistant|>"
FILES = {
    "lines.txt": "Why?\n\n",
    "texts.jsonl": json.dumps({"prompt": "Why?"}),
    "chats.jsonl": json.dumps({"prompt": [{"role": "user", "content": "Why?"}]}),
    "rows.jsonl": json.dumps({"prompt": "Why?", "completion": "So.", "label": False}),
    "dialogues.json": json.dumps(
        [{"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "x"}]}]
    ),
    "table.csv": "question,votes\nWhy?,3\n",
}


@pytest.mark.parametrize(("name", "content"), FILES.items(), ids=FILES.keys())
def test_prompts_of_a_file_are_rendered_as_those_of_rows(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    assert read(tmp_path / name) == [RENDERED]


def test_an_instruction_has_its_input_and_a_named_field_and_a_template_are_taken(tmp_path):
    record = {"instruction": "Add.", "input": "1 2", "other": "Sing."}
    (tmp_path / "p.jsonl").write_text(json.dumps(record))
    assert read(tmp_path / "p.jsonl") == ["<|user|>Add.\n1 2<|assistant|>"]
    assert read(tmp_path / "p.jsonl", input_key="other", input_template="Q: {}\nA:") == ["Q: Sing.\nA:"]


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("none.txt", "\n", "must hold at least one prompt; got none. Add prompts, or leave --sample_prompts out."),
        (
            "p.jsonl",
            '{"a": 1}',
            ":1: must have a field prompt; got the fields 'a'. Name the field with the prompts with",
        ),
        ("p.jsonl", '{"prompt": ""}', ":1: the prompt must not be empty; got ''. Fix the row."),
    ],
)
def test_a_file_without_prompts_is_one_sentence_with_its_place(tmp_path, name, content, sentence):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError) as caught:
        read(tmp_path / name)
    assert sentence in str(caught.value)
    assert str(tmp_path / name) in str(caught.value)
    with pytest.raises(DataError, match="must be an existing file"):
        read(tmp_path / "gone.txt")


def prompts_of(*lengths) -> list[Prompt]:
    return [Prompt("eval", [1, *range(10, 9 + length)]) for length in lengths]


def test_a_prompt_without_room_for_an_answer_is_left_out_or_cut(caplog):
    limits = {"max_len": 20, "max_new_tokens": 12, "bos_id": 1}
    kept, room = fit_prompts(prompts_of(6, 10, 11), truncation="completion", **limits)
    assert [len(prompt.ids) for prompt in kept] == [6, 10]
    assert room == 10
    assert "1 of 3 prompts are left out" in caplog.text
    kept, room = fit_prompts(prompts_of(6, 12), truncation="prompt", **limits)
    assert [prompt.ids for prompt in kept] == [[1, 10, 11, 12, 13, 14], [1, *range(12, 21)]]
    assert room == 10
    assert fit_prompts(prompts_of(6), truncation="drop", **limits)[1] == 12
    with pytest.raises(DataError, match="a prompt must leave 10 tokens of --max_len 20 for its answer; got 1 prompts"):
        fit_prompts(prompts_of(11), truncation="drop", **limits)
