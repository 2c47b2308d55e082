"""What becomes of a prompt and a completion: plain, wrapped in the chat template, or taken as already rendered."""

import logging

import pytest

from openkto.data.dataset import UnpairedPreferenceDataset
from openkto.data.problems import BadRow
from openkto.data.row import Row, RowSettings, begins_with
from openkto.data.rows import RowReader
from openkto.data.template import ChatTemplate
from tests.tokenizers_for_tests import byte_tokenizer

USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}
TEXT = {"prompt": "hi", "completion": " hello", "label": True}
RENDERED = "<|start|>user\nhi<|end|>\n<|start|>assistant\n"


def read(record: dict, template: bool = True, **settings: object) -> Row:
    own = ChatTemplate(byte_tokenizer()) if template else None
    (row,) = RowReader(RowSettings(**settings), own).read("f:1", "f", {"label": True, **record})
    return row


def test_a_text_prompt_goes_through_the_template_where_there_is_one():
    row = read(TEXT)
    assert (row.prompt, row.completion, row.notes) == ([USER], [ANSWER], ("wrapped",))
    assert read(TEXT, template=False).prompt == "hi"


@pytest.mark.parametrize(
    ("settings", "prompt"), [({"apply_chat_template": False}, "hi"), ({"input_template": "Q: {}\nA:"}, "Q: hi\nA:")]
)
def test_a_text_prompt_is_left_plain_where_that_is_asked_for_and_noted_where_there_is_a_template(settings, prompt):
    row = read(TEXT, **settings)
    assert (row.prompt, row.completion, row.notes) == (prompt, " hello", ("left plain",))
    assert read(TEXT, template=False, **settings).notes == ()


@pytest.mark.parametrize("prompt", [RENDERED, "<s>" + RENDERED, "<|start|>system\nx<|end|>\n" + RENDERED.rstrip()])
def test_a_prompt_with_the_template_s_markup_is_not_wrapped_twice(prompt):
    row = read({**TEXT, "prompt": prompt})
    assert (row.prompt, row.completion, row.notes) == (prompt, " hello", ("already rendered",))
    assert read({**TEXT, "prompt": prompt}, apply_chat_template=True).notes == ("wrapped", "wrapped twice")


def test_a_template_of_plain_words_is_recognised_by_both_ends_of_a_turn():
    turns = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    template = turns + "{% if add_generation_prompt %}assistant:{% endif %}"
    is_rendered = ChatTemplate(byte_tokenizer(chat_template=template)).is_rendered
    assert is_rendered("user: hi\nassistant:")
    assert not is_rendered("Ask the user: what now?")


TRANSCRIPT = "User: hi\nAssistant: hello\nUser: and now?"


@pytest.mark.parametrize(
    ("prompt", "template", "settings", "notes"),
    [
        (TRANSCRIPT, False, {}, ("looks like a chat",)),
        (TRANSCRIPT, True, {"apply_chat_template": False}, ("left plain", "looks like a chat")),
        (TRANSCRIPT, True, {}, ("wrapped",)),
        ("[INST] hi [/INST]", False, {}, ("looks like a chat",)),
        ("[INST] hi [/INST]", True, {}, ("wrapped", "foreign markup")),
        ([{"role": "user", "content": "<|im_start|>hi"}], True, {}, ("foreign markup",)),
        ("User: hi", False, {}, ()),
        ("hi", False, {"input_template": "[INST] {} [/INST]"}, ()),
    ],
)
def test_a_prompt_that_looks_like_a_chat_is_noted_where_no_template_has_written_it(prompt, template, settings, notes):
    assert read({**TEXT, "prompt": prompt}, template, **settings).notes == notes


@pytest.mark.parametrize(
    ("prompt", "completion", "notes"),
    [
        ("Human: hi\n\nAssistant:", "hello", ("asks as a transcript",)),
        ("hi\n### Assistant:\n", "AI: hello", ("asks as a transcript", "answers as a transcript")),
        ("hi", "User: hi\nAssistant: hello", ("answers as a transcript",)),
        ("hi", "**Assistant:** hello", ("answers as a transcript",)),
        ("Who is the assistant", "User guide: see below", ()),
        ("Which is it?\nAnswer:", "Aim: none", ()),
    ],
)
def test_a_piece_of_a_transcript_that_becomes_a_message_is_noted(prompt, completion, notes):
    assert read({**TEXT, "prompt": prompt, "completion": completion}, True).notes == ("wrapped", *notes)


def test_line_ends_of_windows_in_an_answer_are_noted():
    row = {**TEXT, "completion": "one\r\ntwo"}
    assert read(row, False).notes == ("carriage returns",)
    assert read(row, True).notes == ("wrapped", "carriage returns")
    assert read({**TEXT, "prompt": "one\r\ntwo"}, False).notes == ()


@pytest.mark.parametrize("answer", ["hello<|im_end|>", "hello <end_of_turn>\n", "hello [/INST]", "hello<|eot_id|>"])
def test_another_templates_markup_in_an_answer_is_noted(answer):
    assert read({**TEXT, "completion": answer}, True).notes == ("wrapped", "foreign end")
    chat = {"prompt": [USER], "completion": [{"role": "assistant", "content": answer}], "label": True}
    assert read(chat, True).notes == ("foreign end",)


@pytest.mark.parametrize("answer", ["hello</s>", "hello<|end|>", "<s>struck</s> out", "an <|end"])
def test_the_tokenizers_own_markup_in_an_answer_is_not_anothers(answer):
    assert read({**TEXT, "completion": answer}, True).notes == ("wrapped",)


def chat_tokenizer(name="", token=None):
    """Return a tokenizer without a template, of that name, or with that token."""
    tokenizer = byte_tokenizer(chat_template=None)
    tokenizer.name_or_path = f"models/{name}"
    if token is not None:
        tokenizer.add_tokens([token], special_tokens=True)
    return tokenizer


@pytest.mark.parametrize("signs", [{"name": "Some-7B-Instruct"}, {"name": "tiny-chat"}, {"token": "<|im_start|>"}])
def test_a_chat_model_without_a_template_is_noted_unless_plain_texts_are_asked_for(signs):
    template = ChatTemplate(chat_tokenizer(**signs))

    def notes(**settings):
        return RowReader(RowSettings(**settings), template).read("f:1", "f", TEXT)[0].notes

    assert notes() == ("template missing",)
    assert notes(apply_chat_template=False) == notes(input_template="Q: {}\nA:") == ()


@pytest.mark.parametrize("name", ["base-7B", "chatty", "Italian-1B"])
def test_a_base_model_needs_no_template(name):
    assert not ChatTemplate(chat_tokenizer(name)).is_missing


def test_a_start_warns_of_a_chat_model_without_a_template_and_says_what_helps(caplog):
    rows = [{"prompt": "hi", "completion": f" hello {n}", "label": n == 0} for n in range(3)]
    with caplog.at_level(logging.WARNING):
        UnpairedPreferenceDataset(rows, chat_tokenizer("Some-7B-Instruct"), 99)
    (line,) = (record.getMessage() for record in caplog.records)
    assert line.startswith("warning: data: 3 rows: the prompt is a plain text and stays one: the tokenizer seems to be")
    assert "chat_template.jinja" in line
    assert "--input_template" in line
    assert "--apply_chat_template false" in line


@pytest.mark.parametrize(("completion", "expected"), [(" a", "a"), ("  a", "  a"), ("a", "a"), ("\ta", "\ta")])
def test_the_single_space_that_joins_plain_texts_is_no_part_of_a_turn(completion, expected):
    assert read({**TEXT, "completion": completion}).completion[0]["content"] == expected


@pytest.mark.parametrize("template", [True, False])
@pytest.mark.parametrize("prompt", ["", " \n", [{"role": "user", "content": " "}]])
def test_an_empty_prompt_is_a_bad_row(prompt, template):
    with pytest.raises(BadRow) as caught:
        read({**TEXT, "prompt": prompt}, template)
    assert caught.value.kind == "empty prompt"


SYSTEM = {"role": "system", "content": "Be kind."}


@pytest.mark.parametrize(
    ("prompt", "completion", "expected"),
    [
        ([USER], [USER, ANSWER], [USER]),
        ("hi", [USER, ANSWER], [USER]),
        ("hi", [SYSTEM, USER, ANSWER], [SYSTEM, USER]),
        ([USER, ANSWER, USER], [USER, ANSWER, USER, ANSWER], [USER, ANSWER, USER]),
    ],
)
def test_a_completion_of_messages_may_repeat_its_prompt(prompt, completion, expected):
    row = read({"prompt": prompt, "completion": completion})
    assert (row.prompt, row.completion) == (expected, [ANSWER])


@pytest.mark.parametrize(
    ("prompt", "completion", "expected"),
    [
        ("Is it?", "Is it? Yes.", True),
        (" Is it?\n", "Is it?Yes.", True),
        ("Is it?", "Is it?", False),
        ("Say", "Saying so", False),
        ("Say", "Say: so", True),
        ("Is it?", "It is.", False),
    ],
)
def test_a_text_completion_that_begins_with_its_prompt_is_noted(prompt, completion, expected):
    assert begins_with(completion, prompt) is expected
    for template in (True, False):
        row = read({"prompt": prompt, "completion": completion}, template)
        assert ("repeats the prompt" in row.notes) is expected


def test_a_prompt_may_end_with_the_beginning_of_the_answer():
    row = read({"prompt": [USER, {"role": "assistant", "content": "hel"}], "completion": "lo"})
    assert (row.notes, row.prompt[-1]["content"]) == (("prefilled",), "hel")


@pytest.mark.parametrize("given", [{"think": False}, '{"think": false}'])
def test_a_row_s_arguments_for_the_template_go_over_the_settings(given):
    row = read({**TEXT, "chat_template_kwargs": given}, chat_template_kwargs={"think": True, "tone": "mild"})
    assert row.template_kwargs == {"think": False, "tone": "mild"}


@pytest.mark.parametrize("given", ["{", [1], {"messages": []}, {"add_generation_prompt": True}])
def test_arguments_that_are_not_the_template_s_own_are_a_bad_row(given):
    with pytest.raises(BadRow, match="chat_template_kwargs must be an object of arguments that only the chat template"):
        read({**TEXT, "chat_template_kwargs": given})


def test_fields_that_nothing_reads_are_named_once_and_empty_ones_are_not():
    reader = RowReader(RowSettings(weight_key="w"))
    for extra in ({"id": 7, "instruction": "x", "images": []}, {"id": 8, "note": None, "history": []}):
        reader.read("f:1", "f", {**TEXT, "w": 1, "kto_tag": True, **extra})
    assert list(reader.unread) == ["id", "instruction"]
