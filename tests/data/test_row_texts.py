import json

import pytest

from openkto.data.row import RowSettings
from openkto.data.row_texts import RowText, row_texts
from openkto.data.sources import find_sources
from tests.helpers.datasets import dataset_of
from tests.text_rows import byte_tokenizer

UNPAIRED = [{"prompt": f"p{i}", "completion": f" c{i}", "label": i % 2 == 0} for i in range(5)]
PAIRS = [{"prompt": f"q{i}", "chosen": f" good{i}", "rejected": f" bad{i}"} for i in range(3)]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_rows_text_is_the_one_that_the_data_set_trains_on_under_its_number(tmp_path):
    files = [write(tmp_path / "a.jsonl", UNPAIRED), write(tmp_path / "b.jsonl", PAIRS)]
    settings = {"apply_chat_template": False, "max_samples": 2}
    tokenizer = byte_tokenizer()
    dataset = dataset_of(files, tokenizer, 64, cache_dir=tmp_path / "cache", **settings)
    numbers = dataset.rows.tolist()
    # Two records of each file are read; the second file's rows follow all five of the first one.
    assert numbers == [0, 1, 5, 6, 7, 8]
    texts = row_texts(find_sources(files, "train"), RowSettings(), numbers, max_samples=2)
    for i, number in enumerate(numbers):
        row = dataset[i]
        whole = tokenizer.decode(row["prompt_ids"] + row["completion_ids"], skip_special_tokens=True)
        assert whole == texts[number].prompt + texts[number].completion
    assert texts[8] == RowText(f"{files[1]}:2", "q1", " bad1")


def test_bad_rows_take_their_numbers_and_messages_are_shown_by_role(tmp_path):
    said = [{"role": "user", "content": "Hi"}]
    rows = [UNPAIRED[0], {"prompt": "no label", "completion": " c"}]
    chat = {"prompt": said, "completion": [{"role": "assistant", "content": "Hello"}], "label": True}
    sources = find_sources([write(tmp_path / "a.jsonl", rows), write(tmp_path / "b.jsonl", [chat])], "train")
    texts = row_texts(sources, RowSettings(), [0, 1, 2], max_samples=10)
    assert texts.keys() == {0, 2}
    assert (texts[2].prompt, texts[2].completion) == ("user: Hi", "assistant: Hello")


@pytest.mark.parametrize("settings", [{"input_template": "Question: {}"}, {"apply_chat_template": True}], ids=str)
def test_a_rows_text_is_that_of_its_file_whatever_is_put_around_it_for_training(tmp_path, settings):
    sources = find_sources([write(tmp_path / "a.jsonl", UNPAIRED)], "train")
    texts = row_texts(sources, RowSettings(**settings), [1], max_samples=10)
    assert (texts[1].prompt, texts[1].completion) == ("p1", " c1")
