"""Formats: what each form of record becomes, and one sentence for each that is none."""

import numpy as np
import pytest

from openkto.data.implicit_prompt import implicit_prompt
from openkto.data.problems import BadRow
from openkto.data.row import Row, RowSettings
from openkto.data.rows import RowReader

USER = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "hello"}
OTHER = {"role": "assistant", "content": "go away"}
SYSTEM = {"role": "system", "content": "be kind"}
CURE = "Fix the row, or pass --on_bad_rows skip to leave such rows out."


def read(*records: object, **settings: object) -> list[Row]:
    reader = RowReader(RowSettings(**settings))
    return [row for number, record in enumerate(records) for row in reader.read(f"f:{number}", "f", record)]


def shape(rows: list[Row]) -> list[tuple]:
    return [(row.prompt, row.completion, row.label) for row in rows]


def error_of(*records: object, **settings: object) -> str:
    with pytest.raises(BadRow) as caught:
        read(*records, **settings)
    return str(caught.value)


def test_unpaired_text_is_taken_as_it_is():
    record = {"prompt": "a ", "completion": " b", "label": True, "id": 7}
    assert shape(read(record)) == [("a ", " b", True)]


@pytest.mark.parametrize("completion", [[ANSWER], ANSWER, "hello"])
@pytest.mark.parametrize("prompt", [[USER], USER])
def test_unpaired_messages_may_be_lists_or_one_message_and_the_answer_text(prompt, completion):
    record = {"prompt": prompt, "completion": completion, "label": False}
    assert shape(read(record)) == [([USER], [ANSWER], False)]


@pytest.mark.parametrize(
    ("record", "settings"),
    [
        (
            {"question": "a", "answer": "b", "is_good": 1},
            {"input_key": "question", "output_key": "answer", "label_key": "is_good"},
        ),
        ({"input": "a", "output": "b", "label": 1}, {"input_key": "input", "output_key": "output"}),
        ({"input": "a", "completion": "b", "kto_tag": True}, {"input_key": "input"}),
        ({"prompt": "a", "output": "b", "label": True}, {"output_key": "output"}),
    ],
)
def test_keys_override_the_format(record, settings):
    assert shape(read(record, **settings)) == [("a", "b", True)]


def test_an_input_key_alone_may_name_a_whole_conversation():
    record = {"chat": [USER, ANSWER], "label": True}
    assert shape(read(record, input_key="chat")) == [([USER], [ANSWER], True)]


@pytest.mark.parametrize("key", ["messages", "conversations"])
@pytest.mark.parametrize("label_key", ["label", "kto_tag"])
def test_a_conversation_ends_with_its_completion(key, label_key):
    record = {key: [SYSTEM, USER, ANSWER, USER, OTHER], label_key: False}
    assert shape(read(record)) == [([SYSTEM, USER, ANSWER, USER], [OTHER], False)]


def test_sharegpt_names_become_roles():
    turns = [("system", "s"), ("human", "h"), ("observation", "o"), ("function", "f"), ("gpt", "g")]
    record = {"conversations": [{"from": role, "value": text} for role, text in turns], "label": True}
    (row,) = read(record)
    assert [(m["role"], m["content"]) for m in [*row.prompt, *row.completion]] == [
        ("system", "s"), ("user", "h"), ("tool", "o"), ("tool", "f"), ("assistant", "g"),
    ]  # fmt: skip


def test_a_function_call_becomes_tool_calls():
    call = {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'}
    record = {"conversations": [{"from": "human", "value": "h"}, call], "label": True}
    expected = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
    assert read(record)[0].completion == [{"role": "assistant", "content": "", "tool_calls": expected}]


def test_tool_calls_need_no_content_and_null_members_are_absent():
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    record = {"prompt": [{**USER, "name": None}], "completion": [call], "label": True}
    (row,) = read(record)
    assert row.prompt == [USER]
    assert row.completion == [{**call, "content": ""}]


def test_content_in_text_parts_is_joined():
    record = {"prompt": [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}],
              "completion": "hello", "label": True}  # fmt: skip
    assert shape(read(record)) == [([USER], [ANSWER], True)]


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": [USER], "chosen": [ANSWER], "rejected": [OTHER]},
        {"prompt": [USER], "chosen": "hello", "rejected": "go away"},
        {"chosen": [USER, ANSWER], "rejected": [USER, OTHER]},
        {"prompt": "hi", "chosen": [USER, ANSWER], "rejected": [USER, OTHER]},
        {"conversations": [{"from": "human", "value": "hi"}], "chosen": {"from": "gpt", "value": "hello"},
         "rejected": {"from": "gpt", "value": "go away"}},
    ],
)  # fmt: skip
def test_a_pair_gives_two_rows_chosen_first(record):
    assert shape(read(record)) == [([USER], [ANSWER], True), ([USER], [OTHER], False)]


def test_a_pair_of_texts_keeps_its_prompt():
    record = {"prompt": "a", "chosen": " b", "rejected": " c"}
    assert shape(read(record)) == [("a", " b", True), ("a", " c", False)]


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt"),
    [
        ("What is it? A cat.", "What is it? A dog.", "What is it? A"),
        ("Say cat", "Say car", "Say"),
        ("Say  cat", "Say  dog", "Say"),
        ("Hello world", "Hello world and more", "Hello"),
        ("Hi\nyes", "Hi no", "Hi"),
        ("\n\nHuman: q\n\nAssistant: yes", "\n\nHuman: q\n\nAssistant: yeah", "\n\nHuman: q\n\nAssistant:"),
        ("\n\nHuman: q\n\nAssistant: I am", "\n\nHuman: q\n\nAssistant: I do", "\n\nHuman: q\n\nAssistant:"),
    ],
)
def test_an_implicit_text_prompt_ends_at_a_word_and_the_space_goes_to_the_answer(chosen, rejected, prompt):
    found, first, second = implicit_prompt("f:0", chosen, rejected)
    assert found == prompt
    assert (found + first, found + second) == (chosen, rejected)


@pytest.mark.parametrize(
    ("chosen", "rejected"), [("same", "same"), ("cat", "dog"), ("cat x", "car x"), ([USER], [USER])]
)
def test_a_pair_without_a_common_prompt_is_an_error(chosen, rejected):
    assert "f:0: chosen and rejected must begin with the same prompt and then differ; got" in error_of(
        {"chosen": chosen, "rejected": rejected}
    )


def test_an_implicit_message_prompt_leaves_the_assistant_s_messages_to_the_answers():
    record = {"chosen": [USER, ANSWER, ANSWER], "rejected": [USER, ANSWER, OTHER]}
    assert shape(read(record)) == [([USER], [ANSWER, ANSWER], True), ([USER], [ANSWER, OTHER], False)]


def test_apply_chat_template_makes_texts_messages():
    record = {"prompt": "hi", "completion": "hello", "label": True, "system": "be kind"}
    assert shape(read(record, apply_chat_template=True)) == [([SYSTEM, USER], [ANSWER], True)]
    record = {"prompt": "hi", "completion": [ANSWER], "label": True}
    assert shape(read(record, apply_chat_template=True)) == [([USER], [ANSWER], True)]


def test_an_input_template_replaces_its_braces_alone():
    record = {"prompt": "{x} {}", "completion": "b", "label": True}
    assert read(record, input_template="Q {0}: {}\nA:")[0].prompt == "Q {0}: {x} {}\nA:"


@pytest.mark.parametrize("tools", [[{"name": "f"}], '[{"name": "f"}]'])
def test_tools_are_a_list_or_its_json(tools):
    assert read({"messages": [USER, ANSWER], "label": True, "tools": tools})[0].tools == [{"name": "f"}]


@pytest.mark.parametrize("tools", [None, "", [], "[]"])
def test_no_tools_are_none(tools):
    assert read({"messages": [USER, ANSWER], "label": True, "tools": tools})[0].tools is None


GOOD = {"prompt": "a", "completion": "b", "label": True}
CHAT = {"prompt": [USER], "completion": [ANSWER], "label": True}


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ("text", "a record must be an object with named fields; got 'text'."),
        ({"prompt": "a", "label": True}, "must have the field completion; got the fields 'prompt', 'label'."),
        ({}, "must have the field label; got the fields none."),
        ({"label": True}, "must have the field prompt; got the fields 'label'."),
        ({"prompt": "a", "completion": "b"}, "must have the field label; got the fields 'prompt', 'completion'."),
        ({**GOOD, "prompt": None}, "prompt must have a value; got null."),
        ({**GOOD, "completion": None}, "completion must have a value; got null."),
        ({**GOOD, "label": None}, "; got None."),
        ({**GOOD, "prompt": 7}, "the prompt must be text or a list of messages; got 7."),
        ({**GOOD, "completion": 7}, "the completion of a text prompt must be text; got 7. Write it as text, or pass"),
        ({**GOOD, "completion": [ANSWER]}, "the completion of a text prompt must be text; got [{"),
        ({**GOOD, "completion": ""}, "the completion must not be empty; got ''."),
        ({**GOOD, "completion": " \n\t"}, "the completion must not be empty; got ' \\n\\t'."),
        ({**GOOD, "system": "x"}, "system needs messages; got a text prompt. Pass --apply_chat_template"),
        ({**GOOD, "tools": [{"name": "f"}]}, "tools needs messages; got a text prompt. Pass --apply_chat_template"),
        ({**GOOD, "system": 3}, "system must be text; got 3."),
        ({**CHAT, "completion": [{**ANSWER, "content": " "}]}, "the completion must not be empty; got ' '."),
        ({**CHAT, "prompt": []}, "the prompt must hold at least one message; got an empty list."),
        ({**CHAT, "completion": []}, "the completion must hold at least one message; got an empty list."),
        ({**CHAT, "prompt": ["hi"]}, "the prompt must be text or a list of messages; got ['hi']."),
        (
            {**CHAT, "prompt": [USER, {**ANSWER, "content": " "}]},
            "must end with the text that the completion continues;",
        ),
        ({**CHAT, "prompt": [{**USER, "content": " "}]}, "the last user message must not be empty; got ' '."),
        ({**GOOD, "prompt": " "}, "the prompt must not be empty; got ' '."),
        ({**CHAT, "chat_template_kwargs": {"tools": 1}}, "must be an object of arguments that only the chat template"),
        ({**CHAT, "completion": [USER]}, "must begin and end with an assistant message; got the roles user."),
        (
            {**CHAT, "completion": [ANSWER, USER]},
            "must begin and end with an assistant message; got the roles assistant,",
        ),
        (
            {**CHAT, "prompt": [{"role": "narrator", "content": "x"}]},
            "a message's role in the prompt must be one of system,",
        ),
        ({**CHAT, "prompt": [{"content": "x"}]}, "a message's role in the prompt must be one of"),
        (
            {**CHAT, "prompt": [{"role": "user", "content": 3}]},
            "a message's content in the prompt must be text; got 3.",
        ),
        (
            {**CHAT, "prompt": [{"role": "user", "content": [{"type": "image"}]}]},
            "a message's content in the prompt must be text; got [{",
        ),
        ({**CHAT, "prompt": [{"role": ["user"], "content": "x"}]}, "a message's role in the prompt must be one of"),
        ({**CHAT, "prompt": [SYSTEM, USER], "system": "x"}, "there must be one system prompt; got one in messages and"),
        ({**CHAT, "tools": "{"}, "tools must be a list of tool schemas, or its JSON text; got '{'."),
        (
            {**CHAT, "completion": [{"from": "function_call", "value": "no"}]},
            "a function_call must be JSON with a name and arguments; got 'no'.",
        ),
    ],
)
def test_a_bad_row_is_one_sentence_with_its_place(record, says):
    message = error_of(GOOD, record)
    assert message.startswith("f:1: ")
    assert says in message
    assert "\n" not in message
    assert len(message) < 400


def test_a_sentence_has_place_rule_value_and_cure():
    assert error_of(GOOD, {**GOOD, "completion": ""}) == f"f:1: the completion must not be empty; got ''. {CURE}"


def test_a_conversation_needs_an_answer_and_a_prompt():
    assert "the last message of messages must be the assistant's; got the role user." in error_of(
        {"messages": [USER], "label": True}
    )
    assert "messages must hold a prompt before the assistant's messages; got only assistant messages." in error_of(
        {"messages": [ANSWER], "label": True}
    )


def test_an_unknown_format_lists_what_was_found_and_what_is_known():
    assert error_of({"question": "a", "score": 3}) == (
        "f:0: a record must have one of the known formats (prompt + completion + label;"
        " messages or conversations + label or kto_tag; prompt + chosen + rejected;"
        " conversations + chosen + rejected; chosen + rejected; the exports in"
        " docs/feedback_tools.md); got the fields 'question', 'score'."
        " Name the fields with --input_key, --output_key and --label_key, likely --input_key question"
        " --label_key score."
    )


def test_a_key_that_is_not_there_is_named():
    assert error_of({"question": "a"}, input_key="quest") == (
        "f:0: --input_key and --output_key must name fields of the rows; got no quest among 'question'."
        " Correct the keys; without them the format is recognised."
    )


def test_the_first_record_s_format_holds_for_the_source():
    record = {"prompt": "a", "chosen": "b", "rejected": "c", "label": True}
    assert "must have the field completion" in error_of(GOOD, record)


def test_the_label_convention_is_held_per_file():
    reader = RowReader(RowSettings())
    reader.read("f:0", "f", {**GOOD, "label": True})
    assert reader.read("g:0", "g", {**GOOD, "label": 0})[0].label is False
    with pytest.raises(BadRow, match="f:0 has True"):
        reader.read("f:1", "f", {**GOOD, "label": 0})


def test_a_label_key_that_was_given_is_not_replaced_by_kto_tag():
    record = {"prompt": "a", "completion": "b", "kto_tag": True}
    assert "must have the field is_good; got the fields" in error_of(record, label_key="is_good")


def test_messages_with_an_input_template_are_refused():
    assert "--input_template needs text prompts; got [{" in error_of(CHAT, input_template="Q: {}")


@pytest.mark.parametrize("key", ["images", "videos", "audios"])
@pytest.mark.parametrize("record", [{"messages": [USER, ANSWER], "label": True}, GOOD])
def test_rows_with_more_than_text_are_refused(record, key):
    assert error_of({**record, key: ["a.png"]}) == f"f:0: {key} must be empty: only text is read; got ['a.png']. {CURE}"
    assert len(read({**record, key: []}, {**record, key: None})) == 2


@pytest.mark.parametrize(("label", "tag"), [(True, False), (False, True), (1, False)])
def test_a_label_and_a_kto_tag_that_contradict_are_a_bad_row(label, tag):
    record = {"messages": [USER, ANSWER], "label": label, "kto_tag": tag}
    says = f"label and kto_tag must say the same; got label {label} and kto_tag {tag}."
    assert says in error_of(record)
    first = {"messages": [USER, ANSWER], "kto_tag": True}
    assert "label and kto_tag must say the same" in error_of(first, record)
    assert read({**record, "kto_tag": bool(label)}, {**record, "kto_tag": None})[1].label is bool(label)
    assert read(record, label_key="kto_tag")[0].label is tag


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "a", "chosen": " b", "rejected": " b"},
        {"prompt": [USER], "chosen": "hello", "rejected": [ANSWER]},
    ],
)
def test_a_pair_of_equal_answers_is_a_bad_row(record):
    assert "chosen and rejected must differ; got" in error_of(record)


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"prompt": "a", "completion": "b", "label": True, "w": 2}, [2.0]),
        ({"prompt": [USER], "completion": [ANSWER], "label": True, "w": 0}, [0.0]),
        ({"messages": [USER, ANSWER], "label": False, "w": "0.5"}, [0.5]),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "w": np.float32(0.25)}, [0.25, 0.25]),
        ({"chosen": [USER, ANSWER], "rejected": [USER, OTHER], "w": 1e3}, [1000.0, 1000.0]),
    ],
)
def test_every_form_has_weights_and_a_pair_weighs_both_its_rows(record, expected):
    assert [row.weight for row in read(record, weight_key="w")] == expected
    assert [row.weight for row in read(record)] == [1.0] * len(expected)


@pytest.mark.parametrize(
    ("value", "got"),
    [(-0.5, "-0.5"), ("much", "'much'"), (True, "True"), (float("nan"), "nan"), ("inf", "'inf'"), ([1], "[1]")],
)
def test_a_weight_is_a_number_of_at_least_zero(value, got):
    record = {"prompt": "a", "completion": "b", "label": True, "w": value}
    assert error_of(record, weight_key="w") == (
        f"f:0: w, the row's weight, must be a number, 0 or more; got {got}. {CURE}"
    )


def test_a_missing_or_null_weight_is_named():
    record = {"prompt": "a", "completion": "b", "label": True}
    assert error_of(record, weight_key="w") == (
        f"f:0: must have the field w; got the fields 'prompt', 'completion', 'label'. {CURE}"
    )
    assert error_of(record | {"w": None}, weight_key="w") == f"f:0: w must have a value; got null. {CURE}"
