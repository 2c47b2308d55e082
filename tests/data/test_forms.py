"""Rows as people have them: fields under other names, nested fields, the exports of feedback tools, labels of turns."""

import json
import logging

import pandas as pd
import pytest

from openkto.data.dataset import UnpairedPreferenceDataset
from openkto.data.fields import find
from openkto.data.problems import BadRow
from openkto.data.row import Row, RowSettings
from openkto.data.rows import RowReader
from openkto.errors import DataError
from tests.helpers.datasets import dataset_of
from tests.text_rows import byte_tokenizer

HI = {"role": "user", "content": "Hi"}
HELLO = {"role": "assistant", "content": "Hello."}
WHO = {"role": "user", "content": "Who?"}
NO = {"role": "assistant", "content": "No."}


def read(*records: object, **settings: object) -> tuple[list[Row], RowReader]:
    reader = RowReader(RowSettings(**settings), None, records)
    return [row for number, record in enumerate(records) for row in reader.read(f"f:{number}", "f", record)], reader


def texts(rows: list[Row]) -> list[tuple]:
    def plain(side: object) -> object:
        return side if isinstance(side, str) else " ".join(str(message["content"]) for message in side)

    return [(plain(row.prompt), plain(row.completion), row.label) for row in rows]


def error_of(*records: object, **settings: object) -> str:
    with pytest.raises(BadRow) as caught:
        read(*records, **settings)
    return str(caught.value)


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("a", [1]),
        ("scores.0.value", [5]),
        ("scores.-1.value", [6]),
        ("scores.*.value", [5, 6]),
        ("scores.taste.value", [6]),
        ("cell.messages.0", ["x"]),
        ("thumb.responses.0", ["up"]),
        ("scores.2.value", []),
        ("a.b", []),
        ("nothing", []),
        ("null", [None]),
    ],
)
def test_a_path_goes_through_objects_lists_and_json_text(path, found):
    record = {
        "a": 1, "scores": [{"name": "thumb", "value": 5}, {"name": "taste", "value": 6}],
        "cell": '{"messages": ["x"]}', "thumb.responses": ["up"], "null": None,
    }  # fmt: skip
    assert find(record, path) == found


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({"question": "Who?"}, "Who?"),
        ({"system": "", "question": "Who?"}, "Who?"),
        ({"instruction": "Shorten.", "input": "A long text."}, "Shorten.\nA long text."),
        ({"instruction": "Shorten.", "input": ""}, "Shorten."),
        ({"input": "Who?"}, "Who?"),
        ({"prompt_id": "7", "question": "Who?"}, "Who?"),
        ({"id": "7", "source": ""}, "It is"),
    ],
)
def test_the_prompt_of_a_pair_is_found_in_its_own_field_before_common_words_are(fields, prompt):
    rows, reader = read({**fields, "chosen": "It is Ann.", "rejected": "It is me."})
    assert [row.prompt for row in rows] == [prompt] * 2
    assert bool(reader.note) == (prompt != "It is")


@pytest.mark.parametrize("fields", [{"question": "Who?", "context": "At night."}, {"user_request": "Who?"}])
def test_a_pair_whose_prompt_may_be_elsewhere_is_refused_with_the_flag(fields):
    message = error_of({**fields, "chosen": "It is Ann.", "rejected": "It is me."})
    assert f"Name the field with the prompt, such as --input_key {next(iter(fields))}." in message
    rows, _ = read({**fields, "chosen": "It is Ann.", "rejected": "It is me."}, input_key=next(iter(fields)))
    assert [row.prompt for row in rows] == ["Who?"] * 2


@pytest.mark.parametrize(
    ("chosen", "rejected"),
    [
        ("\n\nHuman: Who?\n\nAssistant: Ann.", "\n\nHuman: Who?\n\nAssistant: Me."),
        ("Who? It is Ann.", "Who? It is me."),
        ([WHO, HELLO], [WHO, NO]),
    ],
)  # fmt: skip
def test_a_pair_that_holds_its_prompt_keeps_it_beside_a_field_with_the_question(chosen, rejected):
    rows, _ = read({"question": "Who?", "chosen": chosen, "rejected": rejected})
    assert all("Who?" in str(row.prompt) for row in rows)
    assert not any("Who?" in str(row.completion) for row in rows)


def test_alpaca_rows_join_instruction_and_input():
    record = {"instruction": "Add.", "input": "1 + 1", "output": "2", "kto_tag": True}
    assert texts(read(record)[0]) == [("Add.\n1 + 1", "2", True)]


THUMBS = [{"thumbs_up": 1, "thumbs_down": 0}, {"thumbs_up": 0, "thumbs_down": 0}, {"thumbs_up": 0, "thumbs_down": 1}]


@pytest.mark.parametrize("label_key", ["thumbs_up", "thumbs_down"])
@pytest.mark.parametrize("make", [int, str, bool])
def test_two_columns_of_thumbs_are_read_together_and_the_unrated_row_is_left_out(label_key, make):
    thumbs = [{name: make(value) for name, value in row.items()} for row in THUMBS]
    records = [{"prompt": "q", "completion": "a", **both} for both in thumbs]
    rows, reader = read(*records, label_key=label_key)
    assert [row.label for row in rows] == [True, False]
    assert reader.left_out == {"without a label": 1}
    assert "thumbs_up says desirable and thumbs_down undesirable" in reader.note


def test_two_thumbs_at_once_are_a_bad_row():
    record = {"prompt": "q", "completion": "a", "thumbs_up": 1, "thumbs_down": 1}
    assert "thumbs_up and thumbs_down must not both be set; got both." in error_of(record, label_key="thumbs_up")


def test_a_missing_label_names_the_field_that_is_probably_meant():
    record = {"prompt": "q", "completion": "a", "thumbs_up": 1}
    assert error_of(record) == (
        "f:0: must have the field label; got the fields 'prompt', 'completion', 'thumbs_up'."
        " Name the field with the label with --label_key, likely --label_key thumbs_up."
    )


WEB_UI = {
    "data": {"rating": 1},
    "meta": {"message_id": "d"},
    "snapshot": {"chat": {"chat": {"history": {"messages": {
        "a": {"parentId": None, "role": "user", "content": "One?"},
        "b": {"parentId": "a", "role": "assistant", "content": "1."},
        "x": {"parentId": "a", "role": "assistant", "content": "Never."},
        "c": {"parentId": "b", "role": "user", "content": "Two?"},
        "d": {"parentId": "c", "role": "assistant", "content": "2."},
    }}}}},
}  # fmt: skip
LANGFUSE = {"input": {"messages": [HI]}, "output": HELLO, "scores": [{"name": "thumb", "value": 1}]}
STUDIO = {"data": {"question": "Hi", "answer": "Hello."},
          "annotations": [{"result": [{"value": {"choices": ["thumbs_up"]}}]}]}  # fmt: skip
ARGILLA = {"fields": {"prompt": "Hi", "response": "Hello."}, "responses": {"thumb": [{"value": "up"}]}}
LANGSMITH = {"inputs": {"question": "Hi"}, "outputs": {"answer": "Hello."}, "feedback_stats": {"u": {"avg": 1.0}}}


@pytest.mark.parametrize("record", [LANGFUSE, STUDIO, ARGILLA, LANGSMITH])
def test_the_export_of_a_feedback_tool_is_read_and_said(record):
    rows, reader = read(record)
    assert texts(rows) == [("Hi", "Hello.", True)]
    assert ", read from " in reader.note
    assert not reader.unread


def test_the_rated_branch_of_open_web_ui_is_read():
    assert texts(read(WEB_UI)[0]) == [("One? 1. Two?", "2.", True)]


@pytest.mark.parametrize(
    "unrated", [{**LANGFUSE, "scores": []}, {**ARGILLA, "responses": {}}, {**WEB_UI, "data": {"rating": None}}]
)
def test_an_export_s_row_without_a_thumb_is_left_out_and_counted(unrated):
    rows, reader = read(unrated, *[r for r in (LANGFUSE, ARGILLA, WEB_UI) if r.keys() == unrated.keys()])
    assert len(rows) == 1
    assert reader.left_out == {"without a label": 1}


def test_scores_that_differ_are_refused_and_one_can_be_named():
    record = {**LANGFUSE, "scores": [{"name": "thumb", "value": 1}, {"name": "taste", "value": 0}]}
    assert "the labels at scores.*.value must say the same; got 1, 0. Name one with --label_key" in error_of(record)
    assert read(record, label_key="scores.taste.value")[0][0].label is False


def test_nested_fields_can_be_named_in_any_record():
    record = {"q": {"text": "Hi"}, "a": [{"text": "Hello."}], "votes": '{"up": true}'}
    settings = {"input_key": "q.text", "output_key": "a.0.text", "label_key": "votes.up"}
    assert texts(read(record, **settings)[0]) == [("Hi", "Hello.", True)]


@pytest.mark.parametrize(
    "record",
    [
        {"input": {"messages": [HI], "tools": []}, "preferred_output": [HELLO], "non_preferred_output": [NO]},
        {"chosen_messages": [HI, HELLO], "rejected_messages": [HI, NO]},
    ],
)  # fmt: skip
def test_pairs_under_other_names_are_read(record):
    assert texts(read(record)[0]) == [("Hi", "Hello.", True), ("Hi", "No.", False)]


def turn(text: str, **label: object) -> list[dict]:
    return [{"role": "user", "content": f"{text}?"}, {"role": "assistant", "content": f"{text}.", **label}]


def test_each_labelled_turn_is_a_row_and_the_label_is_not_rendered():
    record = {"messages": [*turn("A", label=True), *turn("B"), *turn("C", label=False)]}
    rows, reader = read({"messages": turn("Z")}, record)
    assert texts(rows) == [("A?", "A.", True), ("A? A. B? B. C?", "C.", False)]
    assert all("label" not in message for row in rows for message in [*row.prompt, *row.completion])
    assert [row.offset for row in rows] == [0, 1]
    assert reader.left_out == {"without a label": 1}
    assert reader.rows_of(record) == 2
    assert "each message of messages with a label is a row" in reader.note


def test_a_turn_s_label_may_be_nested():
    rows, _ = read(
        {"chat": turn("A", feedback={"rating": "thumbsDown"})}, input_key="chat", label_key="feedback.rating"
    )
    assert texts(rows) == [("A?", "A.", False)]


def test_a_label_at_a_user_s_message_is_a_bad_row():
    messages = [{**HI, "label": True}, HELLO]
    assert "a message with a label must be the assistant's; got one of the role user." in error_of(
        {"messages": messages}
    )


def test_turns_are_numbered_one_by_one_and_a_dialogue_without_a_label_takes_one_number(write_lines, cache_dir):
    dialogues = [{"messages": turn("A", label=True) + turn("B", label=False)}, {"messages": turn("C")},
                 {"messages": turn("D", label=True)}]  # fmt: skip
    plain = {"prompt": "x", "completion": "y", "label": False}
    paths = [write_lines(dialogues, "a.jsonl"), write_lines([plain], "b.jsonl")]
    dataset = UnpairedPreferenceDataset(paths, byte_tokenizer(), 512)
    assert dataset.rows.tolist() == [0, 1, 3, 4]
    assert dataset.report.rows_read == 5
    dataset = dataset_of(paths, byte_tokenizer(), max_samples=1)
    assert dataset.rows.tolist() == [0, 1, 4]


def test_texts_labelled_both_ways_are_counted_and_said(caplog):
    rows = [{"prompt": "Q", "completion": "A", "label": label} for label in (True, True, False)]
    rows += [{"prompt": "Q", "completion": "B", "label": False}, {"prompt": "R", "completion": "A", "label": False}]
    with caplog.at_level(logging.WARNING):
        dataset = UnpairedPreferenceDataset(rows, byte_tokenizer(), 512)
    assert dataset.report.contradicting == [1, 3, 0, 2]
    assert "1 text is labelled both ways, in 3 rows" in caplog.text
    assert "The first are rows 0 and 2." in caplog.text


def test_what_was_recognised_is_said_at_every_start(caplog):
    for _ in range(2):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            UnpairedPreferenceDataset([LANGFUSE | {"id": 3}], byte_tokenizer(), 512)
        assert "Langfuse's traces or observations, read from input.messages, output, scores.*.value" in caplog.text
        assert "fields that are not read: id" in caplog.text


def test_a_threshold_reads_stars_and_says_what_is_left_out(caplog):
    rows = [{"prompt": f"q{n}", "completion": "a", "label": n} for n in (1, 2, 3, 4, 5)]
    with caplog.at_level(logging.INFO):
        dataset = dataset_of(rows, byte_tokenizer(), label_threshold=(4, 2))
    assert dataset.labels.tolist() == [False, False, True, True]
    assert dataset.rows.tolist() == [0, 1, 3, 4]
    assert "left out 1 row with a label that --label_map or --label_threshold leaves out" in caplog.text


def test_nothing_but_unrated_rows_is_an_error_with_the_count():
    with pytest.raises(DataError, match="at least one row must be left; got 2 rows without a label"):
        UnpairedPreferenceDataset([{**LANGFUSE, "scores": []}] * 2, byte_tokenizer(), 512)


TABLE = [{"prompt": "Is ice warm?", "completion": "No.", "label": True}, {"prompt": "b", "completion": "c", "label": 0}]


@pytest.mark.parametrize(
    "table",
    [
        {name: [row[name] for row in TABLE] for name in TABLE[0]},
        {name: {str(i): row[name] for i, row in enumerate(TABLE)} for name in TABLE[0]},
        {"columns": list(TABLE[0]), "index": [0, 1], "data": [list(row.values()) for row in TABLE]},
    ],
    ids=["lists", "by index", "split"],
)
def test_a_table_by_its_columns_is_no_row(table):
    assert error_of(table) == (
        f"f:0: a record must be one row; got a whole table by its columns, '{', '.join(table)}'. Write one object per "
        "row, as pandas does with to_json(FILE, orient='records', lines=True)."
    )


def test_an_object_of_splits_is_no_row():
    assert error_of({"train": TABLE, "test": []}) == (
        "f:0: a record must be one row; got the splits train, test. Write each split into its own file, as jq -c "
        "'.train[]' FILE does."
    )


def test_a_missing_label_as_pandas_writes_it_is_a_missing_label():
    with_nan = {**TABLE[0], "label": float("nan")}
    assert "label must be true or false, 1 or 0" in error_of(with_nan)
    rows, reader = read({**TABLE[0], "label": 5.0}, with_nan, label_threshold=(4.0,))
    assert [row.label for row in rows] == [True]
    assert reader.left_out == {"without a label": 1}
    assert "got NaN" in error_of(with_nan)
    assert "got <NA>" in error_of({**TABLE[0], "label": pd.NA})


@pytest.mark.parametrize("missing", [None, float("nan"), pd.NA], ids=repr)
def test_a_missing_label_beside_another_or_in_a_turn_says_nothing(missing):
    assert [row.label for row in read({**TABLE[0], "label": True, "kto_tag": missing})[0]] == [True]
    texts_only = {"prompt": "q", "completion": "a"}
    rows, reader = read(
        {**texts_only, "thumbs_up": missing, "thumbs_down": True},
        {**texts_only, "thumbs_up": missing, "thumbs_down": missing},
        label_key="thumbs_up",
    )
    assert ([row.label for row in rows], reader.left_out) == ([False], {"without a label": 1})
    said = [("user", "q", missing), ("assistant", "a", missing), ("user", "r", missing), ("assistant", "b", True)]
    turns = [{"role": role, "content": text, "label": label} for role, text, label in said]
    assert [row.label for row in read({"messages": turns})[0]] == [True]


@pytest.mark.parametrize(
    "columns",
    [
        {"messages": str([{"role": "user", "content": "x"}])},
        {"prompt": str([{"role": "user", "content": "it's x"}]), "completion": "y"},
        {"prompt": "x", "completion": str([{"from": "gpt", "value": "y"}])},
        {"prompt": "x", "completion": str({"content": "y", "role": "assistant"})},
    ],
)
def test_messages_in_pythons_notation_are_named_and_never_trained_on_as_text(columns):
    error = error_of({**columns, "label": True})
    assert "This is Python's notation: write it with json.dumps, or pass --on_bad_rows skip" in error


@pytest.mark.parametrize("text", ["{'value': 3} is a dict", "[{'role'", "say {'role': 1, 'content': 2}"])
def test_a_text_about_python_is_a_text(text):
    rows, _ = read({"prompt": text, "completion": "y", "label": True})
    assert rows[0].prompt == text


def test_a_table_with_only_its_prompt_named_is_asked_for_its_answers():
    error = error_of({"question": "x", "my_reply": "y", "label": True}, input_key="question")
    assert "Name the field with the answer with --output_key, likely --output_key my_reply." in error


def test_a_dialogue_under_another_name_is_told_how_it_is_read():
    dialogue = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    for column in (dialogue, json.dumps(dialogue)):
        error = error_of({"chat": column, "rating": 1})
        assert error.endswith("and --label_key, likely --input_key chat --label_key rating.")
    assert error_of({"chat": "User: x", "label": 1}).endswith("with --input_key, --output_key and --label_key.")


def test_a_dialogue_in_one_text_is_told_to_become_messages():
    error = error_of({"messages": "User: Hi\nAssistant: Hello", "label": True})
    assert "messages must be a list of messages; got 'User: Hi" in error
    assert "Give messages with role and content, or a column for the prompt and one for the answer, or pass" in error


@pytest.mark.parametrize(
    "columns",
    [
        {"role": ["user", "assistant"], "content": ["Is ice warm?", "No."]},
        {"from": ["human", "gpt"], "value": ["Is ice warm?", "No."]},
        {"role": ["user", "assistant"], "content": ["Is ice warm?", "No."], "name": [None, None]},
    ],
)
def test_a_struct_of_lists_is_the_list_of_its_messages(columns):
    rows, _ = read({"messages": columns, "label": True})
    assert texts(rows) == [("Is ice warm?", "No.", True)]
    halves = {"prompt": {k: v[:1] for k, v in columns.items()}, "completion": {k: v[1:] for k, v in columns.items()}}
    assert texts(read({**halves, "label": False})[0]) == [("Is ice warm?", "No.", False)]


def test_lists_of_other_lengths_in_a_struct_are_no_messages():
    error = error_of({"messages": {"role": ["user", "assistant"], "content": ["Is ice warm?"]}, "label": True})
    assert error.startswith("f:0: ")


@pytest.mark.parametrize(
    ("asks", "answers"), [("User", "Assistant"), ("human", "model"), ("HUMAN", "ai"), ("user", "Bot")]
)
def test_roles_of_other_programs_are_the_users_and_the_assistants(asks, answers):
    messages = [{"role": asks, "content": "Is ice warm?"}, {"role": answers, "content": "No."}]
    (row,), _ = read({"messages": messages, "label": True})
    assert [message["role"] for message in (*row.prompt, *row.completion)] == ["user", "assistant"]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "text", "text": "No."},
        {"type": "output_text", "text": "No.", "annotations": []},
        {"type": "text", "value": "No."},
        {"text": "No."},
    ],
)
def test_parts_of_text_are_the_text_whatever_they_are_called(part):
    asked = [{"type": "input_text", "text": "Is ice "}, {"type": "input_text", "text": "warm?"}]
    messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": [part]}]
    assert texts(read({"messages": messages, "label": True})[0]) == [("Is ice warm?", "No.", True)]
