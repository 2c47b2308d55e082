"""The chat template: its date, its ends of turns, and what a row says that it leaves out."""

import pytest

from openkto.data.problems import BadRow
from openkto.data.row import Row
from openkto.data.template import ChatTemplate, common_end, common_start, with_date
from openkto.data.tokenize import RowTokenizer, TokenizedRow
from tests.tokenizers_for_tests import END, EOS, byte_tokenizer

USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}
PLAIN = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"function": {"name": "add", "arguments": {"a": "one", "b": 2}}}],
}
AS_TEXT = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"function": {"name": "add", "arguments": '{"a": "one", "b": 2}'}}],
}


def tokenized(template: str, prompt: list, completion: list, **known) -> TokenizedRow | BadRow:
    (row,) = RowTokenizer(byte_tokenizer(chat_template=template)).tokenize(
        [Row("f:1", prompt, completion, True, **known)]
    )
    return row


def completion_of(template: str, completion: list, **known) -> str:
    row = tokenized(template, [USER], completion, **known)
    assert isinstance(row, TokenizedRow), row
    return byte_tokenizer().decode(row.completion_ids)


def test_a_template_that_prints_the_date_prints_the_given_one_in_every_form():
    template = "{{ strftime_now('%d %B %Y, %A %H:%M') }}|{% set f = '%b %-d %y' %}{{ strftime_now(f) }}\n{{ 1 }}"
    tokenizer = byte_tokenizer(chat_template=template)
    assert ChatTemplate(tokenizer, "2024-02-03").render("", [USER]) == "03 February 2024, Saturday 00:00|Feb 3 24\n1"
    assert with_date("no date", "2024-02-03") == "no date"


def test_texts_have_in_common_what_a_walk_over_their_characters_finds():
    for first, second in [("abc", "abd"), ("", "a"), ("aba", "aba"), ("xabc", "yabc"), ("aab", "ab"), ("a", "b")]:
        start = next(
            (i for i, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]),
            min(len(first), len(second)),
        )
        assert common_start(first, second) == start
        assert common_end(first[::-1], second[::-1]) == start


@pytest.mark.parametrize(
    ("closing", "expected"),
    [
        ("<|end|>\n", END),
        ("</s>\n", EOS),
        ("", None),
        ("<|end|>{% if loop.last %}</s>{% endif %}", END),
        (" </s><s>", EOS),
    ],
)
def test_the_token_that_a_template_ends_an_answer_with_is_found(closing, expected):
    tokenizer = byte_tokenizer(chat_template=PLAIN.replace("<|end|>", closing))
    assert ChatTemplate(tokenizer).end_ids == ({tokenizer.convert_tokens_to_ids(expected)} if expected else frozenset())


def test_a_pad_token_that_ends_turns_ends_the_completion():
    tokenizer = byte_tokenizer(chat_template=PLAIN.replace("<|end|>", "<|end|></s>"))
    tokenizer.pad_token = END
    (row,) = RowTokenizer(tokenizer, end_token_ids=[tokenizer.convert_tokens_to_ids(END)]).tokenize(
        [Row("f:1", [USER], [ANSWER], True)]
    )
    assert tokenizer.decode(row.completion_ids) == "hello" + END
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = END
    (row,) = RowTokenizer(tokenizer).tokenize([Row("f:1", [USER], [ANSWER], True)])
    assert tokenizer.decode(row.completion_ids) == "hello" + END


def test_a_text_that_ends_with_a_token_which_ends_no_turn_gets_eos():
    tokenizer = byte_tokenizer()
    for completion, expected in (("b<|start|>", f"b<|start|>{EOS}"), (f"b{END}", f"b{END}"), (f"b{EOS}", f"b{EOS}")):
        (row,) = RowTokenizer(tokenizer).tokenize([Row("f:1", "a", completion, True)])
        assert tokenizer.decode(row.completion_ids) == expected


@pytest.mark.parametrize("completion", [EOS, f" {EOS}\n", END])
def test_an_answer_that_is_its_end_alone_is_a_bad_row(completion):
    (row,) = RowTokenizer(byte_tokenizer()).tokenize([Row("f:1", "a", completion, True)])
    assert isinstance(row, BadRow)
    assert str(row).startswith("f:1: the completion must say something before its end of turn; got ")


@pytest.mark.parametrize(
    ("written", "completion"),
    [
        ("{{ c.function.arguments | tojson }}", '{"a": "one", "b": 2}'),
        ("{{ 'x' + c.function.arguments }}", 'x{"a": "one", "b": 2}'),
        ("{{ c.function.arguments }}", '{"a": "one", "b": 2}'),
        ("{% if c.function.arguments is string %}{{ c.function.arguments }}{% endif %}", '{"a": "one", "b": 2}'),
        ("{% for k, v in c.function.arguments | items %}<{{ k }}>{{ v }}{% endfor %}", "<a>one<b>2"),
    ],
)
@pytest.mark.parametrize("call", [CALL, AS_TEXT])
def test_arguments_of_a_call_reach_the_template_as_it_takes_them(written, completion, call):
    template = PLAIN.replace(
        "{{ m.content }}",
        "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}" + written + "{% endfor %}",
    )
    assert completion_of(template, [call]) == f"add{completion}{END}"


LOST = PLAIN.replace("{% for m in messages %}", "{% for m in messages if m.role in ('user', 'assistant') %}")


@pytest.mark.parametrize(
    ("prompt", "completion", "kind"),
    [
        ([USER], [CALL], "tool call not rendered"),
        ([USER], [{**ANSWER, "reasoning_content": "I greet."}], "reasoning not rendered"),
        ([USER], [{**ANSWER, "reasoning": "I greet."}], "reasoning not rendered"),
        ([{"role": "system", "content": "Be brief."}, USER], [ANSWER], "system not rendered"),
        ([USER, CALL, {"role": "tool", "content": "3"}], [ANSWER], "tool call not rendered"),
        ([USER, ANSWER, {"role": "tool", "content": "none"}, USER], [ANSWER], "tool not rendered"),
    ],
)
def test_what_the_template_leaves_out_is_a_bad_row_with_a_cure(prompt, completion, kind):
    row = tokenized(LOST, prompt, completion)
    assert isinstance(row, BadRow)
    assert row.kind == kind
    assert "the chat template must render" in str(row)
    assert "--on_bad_rows skip leaves such rows out." in str(row)


def test_tools_and_earlier_reasoning_that_the_template_leaves_out_are_noted():
    earlier = [USER, {**ANSWER, "reasoning_content": "I greet."}, USER]
    row = tokenized(PLAIN, earlier, [ANSWER], tools=[{"type": "function", "function": {"name": "add"}}])
    assert isinstance(row, TokenizedRow)
    assert row.notes == ("reasoning left out", "tools left out")


def test_a_template_may_trim_escape_or_part_what_it_is_given():
    template = PLAIN.replace(
        "{{ m.content }}",
        "{{ m.content.strip() | tojson if m.role == 'user' else m.content.split('</think>') | join(' ') }}",
    )
    said = [{"role": "assistant", "content": "<think>so</think>two"}]
    assert isinstance(tokenized(template, [{"role": "user", "content": ' "a"\n\tü \n'}], said), TokenizedRow)


def test_a_developer_goes_as_the_system_where_the_template_does_not_know_the_role():
    prompt = [{"role": "developer", "content": "Be brief."}, USER]
    row = tokenized(PLAIN, prompt, [ANSWER])
    assert isinstance(row, TokenizedRow)
    assert row.notes == ("developer as system",)
    assert byte_tokenizer().decode(row.prompt_ids).startswith("<|start|>system\nBe brief.")
    row = tokenized("{# developer #}" + PLAIN, prompt, [ANSWER])
    assert isinstance(row, TokenizedRow)
    assert byte_tokenizer().decode(row.prompt_ids).startswith("<|start|>developer\nBe brief.")


def test_the_prompt_is_never_cut_inside_a_special_token():
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}<|start|>{{ m.content }}{% elif m.tool_calls %}<s><|end|>"
        "{{ m.tool_calls[0].function.name }}</s>{% else %}<s><|start|>{{ m.content }}</s>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<s><think>{% endif %}"
    )
    row = tokenized(template, [USER], [CALL])
    assert isinstance(row, TokenizedRow)
    decode = byte_tokenizer().decode
    assert (decode(row.prompt_ids), decode(row.completion_ids)) == ("<|start|>hi<s>", f"{END}add{EOS}")


def test_the_token_of_the_next_role_that_ends_a_turn_is_scored():
    turns = "{% for m in messages %}{{ '<|start|>' if m.role == 'tool' else '<s>' }}{{ m.content }}{% endfor %}"
    template = turns + "{% if add_generation_prompt %}<s>{% endif %}"
    tokenizer = byte_tokenizer(chat_template=template)
    ends = tokenizer.convert_tokens_to_ids(["<|start|>", EOS])
    chain = [ANSWER, {"role": "tool", "content": "3"}, ANSWER]
    (row,) = RowTokenizer(tokenizer, end_token_ids=ends).tokenize([Row("f:1", [USER], chain, True)])
    scored = [i for i, flag in zip(row.completion_ids, row.completion_mask, strict=True) if flag]
    assert tokenizer.decode(row.completion_ids) == f"hello<|start|>3<s>hello{EOS}"
    assert tokenizer.decode(scored) == f"hello<|start|>hello{EOS}"


EMPTY_THOUGHT = PLAIN.replace(
    "{{ m.content }}",
    "{% if m.role == 'assistant' and loop.last %}<think>{{ '\n\n' }}</think>{% endif %}{{ m.content }}",
).replace("<|start|>assistant\n", "<|start|>assistant\n{% if quiet %}<think>{{ '\n\n' }}</think>{% endif %}")


def test_an_empty_think_block_is_noted_and_a_row_s_arguments_move_it_into_the_prompt():
    row = tokenized(EMPTY_THOUGHT, [USER], [ANSWER])
    assert isinstance(row, TokenizedRow)
    assert row.notes == ("empty think block",)
    row = tokenized(EMPTY_THOUGHT, [USER], [ANSWER], template_kwargs={"quiet": True})
    assert isinstance(row, TokenizedRow)
    assert row.notes == ()
    assert byte_tokenizer().decode(row.completion_ids) == "hello" + END


def test_a_prefilled_answer_is_continued_and_only_its_rest_is_scored():
    begun = {"role": "assistant", "content": "It is"}
    row = tokenized(PLAIN, [USER, begun], [{"role": "assistant", "content": " so."}])
    assert isinstance(row, TokenizedRow)
    decode = byte_tokenizer().decode
    assert decode(row.prompt_ids) == f"<|start|>user\nhi{END}<|start|>assistant\nIt is"
    assert decode(row.completion_ids) == f" so.{END}"
