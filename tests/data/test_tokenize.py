"""Tokens: what generation sees is what training sees, the first completion token counts, and the turn ends once."""

import pytest
from transformers import ByT5Tokenizer

from openkto.data.messages import Message
from openkto.data.problems import BadRow
from openkto.data.row import Row
from openkto.data.tokenize import RowTokenizer, TokenizedRow, choose_pad_token
from openkto.errors import DataError
from tests.tokenizers_for_tests import BOS, CHAT_TEMPLATE, END, EOS, byte_tokenizer, metaspace_tokenizer

USER: list[Message] = [{"role": "user", "content": "hi"}]
ANSWER: list[Message] = [{"role": "assistant", "content": "hello"}]


def tokenize(tokenizer, prompt, completion, tools=None) -> TokenizedRow:
    (result,) = RowTokenizer(tokenizer).tokenize([Row("f:1", prompt, completion, True, tools)])
    if isinstance(result, BadRow):
        raise result
    return result


def text_of(tokenizer, ids) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def scored(tokenizer, row: TokenizedRow) -> str:
    return text_of(tokenizer, [i for i, flag in zip(row.completion_ids, row.completion_mask, strict=True) if flag])


@pytest.mark.parametrize("bos", ["on", "off", "none"])
@pytest.mark.parametrize("adds_eos", [False, True])
def test_a_text_prompt_has_the_ids_that_generation_gets(bos, adds_eos):
    tokenizer = byte_tokenizer(bos=bos, adds_eos=adds_eos)
    row = tokenize(tokenizer, "Q: x\nA:", " yes ü")
    ids = tokenizer("Q: x\nA:")["input_ids"]
    assert row.prompt_ids == (ids[:-1] if adds_eos else ids)
    assert (
        text_of(tokenizer, row.prompt_ids + row.completion_ids) == (BOS if bos == "on" else "") + "Q: x\nA: yes ü" + EOS
    )
    assert None not in row.prompt_ids + row.completion_ids
    assert row.completion_mask == [True] * len(row.completion_ids)


@pytest.mark.parametrize("bos", ["on", "off", "none"])
def test_a_message_prompt_has_the_ids_that_the_template_gives(bos):
    template = ("" if bos == "none" else BOS) + CHAT_TEMPLATE
    tokenizer = byte_tokenizer(bos=bos, chat_template=template)
    row = tokenize(tokenizer, USER, ANSWER)
    assert row.prompt_ids == tokenizer.apply_chat_template(
        USER, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert row.prompt_ids.count(tokenizer.bos_token_id) == (0 if bos == "none" else 1)
    assert text_of(tokenizer, row.completion_ids) == "hello" + END


def test_a_text_that_begins_with_bos_keeps_one():
    tokenizer = byte_tokenizer(bos="on")
    assert tokenize(tokenizer, BOS + "a", "b").prompt_ids == tokenizer("a")["input_ids"]


@pytest.mark.parametrize("completion", ["yes", "yes" + EOS, "yes" + EOS + "\n", "yes" + EOS + EOS])
@pytest.mark.parametrize("adds_eos", [False, True])
def test_a_text_completion_ends_with_one_eos(completion, adds_eos):
    tokenizer = byte_tokenizer(adds_eos=adds_eos)
    assert text_of(tokenizer, tokenize(tokenizer, "a", completion).completion_ids) == "yes" + EOS


def test_pad_equal_to_eos_does_not_hide_eos():
    tokenizer = byte_tokenizer(pad="eos")
    row = tokenize(tokenizer, "a", "b")
    assert row.completion_ids[-1] == tokenizer.pad_token_id
    assert row.completion_mask == [True, True]


def test_what_a_template_renders_after_the_end_of_turn_is_not_scored():
    tokenizer = byte_tokenizer()
    row = tokenize(tokenizer, USER, ANSWER)
    assert row.completion_ids[-1] == tokenizer.convert_tokens_to_ids(END)


def test_a_template_without_end_of_turn_gets_eos():
    template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    tokenizer = byte_tokenizer(chat_template=template)
    row = tokenize(tokenizer, USER, ANSWER)
    assert text_of(tokenizer, row.prompt_ids) == "user: hi\nassistant: "
    assert text_of(tokenizer, row.completion_ids) == "hello\n" + EOS


def test_an_unknown_token_at_the_end_is_no_end_of_turn():
    tokenizer = byte_tokenizer()
    tokenizer.unk_token = END
    row = tokenize(tokenizer, "a", "b" + END)
    assert text_of(tokenizer, row.completion_ids) == "b" + END + EOS


def test_no_eos_at_all_is_an_error_with_its_cure():
    tokenizer = byte_tokenizer(has_eos=False)
    with pytest.raises(DataError) as caught:
        tokenize(tokenizer, "a", "b")
    assert str(caught.value) == (
        "f:1: a completion must end with an end-of-text token; got a tokenizer without one, unnamed."
        " Set eos_token in the tokenizer's configuration."
    )


@pytest.mark.parametrize(
    ("prompt", "completion", "merge"),
    [("Say: ", "cat", ("\u0120", "c")), ("Say", "ing", ("y", "i")), ("a\n", "\nb", ("\u010a", "\u010a"))],
)
def test_a_merge_over_the_boundary_leaves_the_prompt_as_generation_sees_it(prompt, completion, merge):
    tokenizer = byte_tokenizer(merges=(merge,))
    row = tokenize(tokenizer, prompt, completion)
    assert row.is_merged
    assert row.prompt_ids == tokenizer(prompt)["input_ids"]
    assert row.completion_ids == [*tokenizer(completion)["input_ids"], tokenizer.eos_token_id]
    assert text_of(tokenizer, row.prompt_ids + row.completion_ids) == prompt + completion + EOS


def test_without_a_merge_the_completion_is_the_rest_of_the_whole():
    tokenizer = byte_tokenizer(merges=(("\u0120", "c"),))
    row = tokenize(tokenizer, "Say:", " cat")
    assert not row.is_merged
    assert row.prompt_ids + row.completion_ids == [*tokenizer("Say: cat")["input_ids"], tokenizer.eos_token_id]
    assert len(row.completion_ids) == 4  # " c", "a", "t", EOS


@pytest.mark.parametrize("prepend", ["always", "first"])
@pytest.mark.parametrize(
    ("prompt", "completion"),
    [("Say: ", "the cat"), ("Say:", " the cat"), ("Say a t", "he"), ("Say ", " \u00e9"), ("x\n", "\ny")],
)
def test_a_continuation_has_no_dummy_prefix_space(prepend, prompt, completion):
    tokenizer = metaspace_tokenizer(prepend=prepend)
    row = tokenize(tokenizer, prompt, completion)
    assert row.prompt_ids == tokenizer(prompt)["input_ids"]
    whole = tokenizer(prompt + completion)["input_ids"]
    assert text_of(tokenizer, row.prompt_ids + row.completion_ids) == text_of(tokenizer, whole) + EOS
    assert row.is_merged == ((prompt, completion) in [("Say: ", "the cat"), ("Say a t", "he")])


def test_a_slow_tokenizer_works_but_for_completions_of_several_messages():
    tokenizer = ByT5Tokenizer(chat_template=CHAT_TEMPLATE)
    row = tokenize(tokenizer, "hi ", "hello")
    assert row.prompt_ids == tokenizer("hi ")["input_ids"][:-1]
    assert row.completion_ids == tokenizer("hello")["input_ids"]
    assert text_of(tokenizer, tokenize(tokenizer, USER, ANSWER).completion_ids).startswith("hello<|end|>")
    with pytest.raises(DataError, match="a completion of several messages needs a fast tokenizer"):
        tokenize(tokenizer, USER, TOOL_USE)


def test_merges_and_ends_are_the_same_in_a_batch_as_alone():
    tokenizer = byte_tokenizer(merges=(("y", "i"), ("\u0120", "c")))
    rows = [
        Row(f"f:{n}", prompt, "ing" * (n + 1), n % 2 == 0) for n, prompt in enumerate(["Say", "Cry ", "y", "b"] * 3)
    ]
    assert RowTokenizer(tokenizer).tokenize(rows) == [RowTokenizer(tokenizer).tokenize([row])[0] for row in rows]


THINKING = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n<think>\n{% endif %}"
)


@pytest.mark.parametrize("content", ["hello", "<b>hello</b>", "Aloha", "<think>\nhello"])
def test_where_the_template_differs_the_common_text_is_the_prompt(content):
    tokenizer = byte_tokenizer(chat_template=THINKING)
    row = tokenize(tokenizer, USER, [{"role": "assistant", "content": content}])
    if content.startswith("<think>\n"):
        assert not row.template_differs
        assert text_of(tokenizer, row.prompt_ids).endswith("assistant\n<think>\n")
    else:
        assert row.template_differs
        assert text_of(tokenizer, row.prompt_ids).endswith("<|start|>assistant\n")
        assert text_of(tokenizer, row.completion_ids) == content + END


def test_a_template_that_changes_the_prompt_when_answered_is_refused():
    template = "{{ messages | length }}" + CHAT_TEMPLATE
    with pytest.raises(
        BadRow, match="the chat template must render the prompt the same with and without the answer; got"
    ):
        tokenize(byte_tokenizer(chat_template=template), USER, ANSWER)


TOOL_USE: list[Message] = [
    {"role": "assistant", "content": "look it up"},
    {"role": "tool", "content": "42"},
    {"role": "assistant", "content": "it is 42"},
]


@pytest.mark.parametrize("merges", [(), (("p", "<"),), (("\u010a", "l"),), (("\u010a", "4"), ("\u010a", "i"))])
def test_tool_results_within_a_completion_are_context(merges):
    tokenizer = byte_tokenizer(merges=merges)
    row = tokenize(tokenizer, USER, TOOL_USE)
    assert text_of(tokenizer, row.completion_ids) == (
        f"look it up{END}\n<|start|>tool\n42{END}\n<|start|>assistant\nit is 42{END}"
    )
    expected = f"look it up{END}it is 42{END}"
    # A token that merges a header's newline with the answer holds the answer's first letter, so it counts.
    assert scored(tokenizer, row) == (expected.replace("it is", "\nit is") if len(merges) == 2 else expected)
    assert row.completion_mask[0]


def test_a_turn_that_the_template_renders_otherwise_once_others_follow_is_found_in_the_whole():
    block = "{% if loop.last and message['role'] == 'assistant' %}<think>\n\n</think>\n\n{% endif %}"
    template = CHAT_TEMPLATE.replace("{{ message['content'] }}", block + "{{ message['content'] }}")
    tokenizer = byte_tokenizer(chat_template=template)
    row = tokenize(tokenizer, USER, TOOL_USE)
    assert scored(tokenizer, row) == f"look it up{END}<think>\n\n</think>\n\nit is 42{END}"
    assert "empty think block" not in row.notes


def test_several_messages_in_another_order_are_refused():
    template = "{% for m in messages | reverse %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>{% endfor %}"
    with pytest.raises(BadRow, match="the chat template must render the prompt the same with and without the answer"):
        tokenize(byte_tokenizer(chat_template=template), USER, TOOL_USE)


def test_tools_reach_the_template():
    tokenizer = byte_tokenizer()
    row = tokenize(tokenizer, USER, ANSWER, tools=[{"name": "f"}])
    assert text_of(tokenizer, row.prompt_ids).startswith('<|start|>tools\n[{"name": "f"}]<|end|>\n')


def test_messages_without_a_template_are_an_error_with_its_cure():
    tokenizer = byte_tokenizer(chat_template=None)
    tokenizer.name_or_path = "models/base"
    with pytest.raises(DataError) as caught:
        tokenize(tokenizer, USER, ANSWER)
    assert not isinstance(caught.value, BadRow)
    assert str(caught.value) == (
        "f:1: message lists need a tokenizer with a chat template; got none in models/base."
        " Use a chat model's tokenizer, put a chat_template.jinja into the model's folder, or give texts."
    )


def test_a_template_that_raises_is_a_bad_row():
    template = "{{ raise_exception('no system prompts') }}"
    with pytest.raises(BadRow) as caught:
        tokenize(byte_tokenizer(chat_template=template), USER, ANSWER)
    assert str(caught.value).startswith(
        "f:1: the messages must be ones that the tokenizer's chat template takes;"
        " got TemplateError: 'no system prompts'."
    )


@pytest.mark.parametrize(
    ("prompt", "completion", "says"),
    [
        ("", "a", "the prompt must have at least one token, which the first completion token follows; got ''."),
        ("a\ud800", "b", "the text must be valid Unicode; got half a surrogate pair, '\\ud800'."),
        ("a", "b\udc00", "the text must be valid Unicode; got half a surrogate pair, '\\udc00'."),
    ],
)
def test_texts_that_cannot_be_tokens_are_bad_rows(prompt, completion, says):
    with pytest.raises(BadRow) as caught:
        tokenize(byte_tokenizer(), prompt, completion)
    assert says in str(caught.value)


def test_a_template_that_drops_the_answer_is_a_bad_row():
    template = "{% if messages[-1]['role'] == 'assistant' %}x{% else %}x{% endif %}"
    with pytest.raises(BadRow, match="the completion must not be empty after the chat template"):
        tokenize(byte_tokenizer(chat_template=template), USER, ANSWER)


@pytest.mark.parametrize(
    ("prompt", "completion", "expected"),
    [("a", "b", False), ("a" + END, "b", True), ("a", f"b{EOS}c", True), ("a", "b" + EOS, False)],
)
def test_special_markup_in_a_text_is_counted(prompt, completion, expected):
    assert tokenize(byte_tokenizer(), prompt, completion).has_special_markup is expected


def test_padding_takes_a_token_that_is_there():
    tokenizer = byte_tokenizer(pad="own")
    assert choose_pad_token(tokenizer) == (tokenizer.pad_token_id, "pad_token")
    tokenizer = byte_tokenizer(pad="none")
    size = len(tokenizer)
    assert choose_pad_token(tokenizer) == (tokenizer.eos_token_id, "eos_token")
    assert len(tokenizer) == size
    assert tokenizer.pad_token is None
    assert choose_pad_token(metaspace_tokenizer()) == (0, "unk_token")
