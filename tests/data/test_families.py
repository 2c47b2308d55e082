"""Templates of model families: prompts are generation's, completions what inference would have written, or refused."""

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from openkto.data.problems import BadRow
from openkto.data.row import Row, RowSettings
from openkto.data.rows import RowReader
from openkto.data.tokenize import RowTokenizer, TokenizedRow
from tests.data.families import ANSWER, ASK, FAMILIES, Family

DAY = "2024-02-03"
USER = {"role": "user", "content": ASK}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "abcdefgh1", "type": "function", "function": {"name": "add", "arguments": {"first": "two"}}}],
}
RESULT = {"role": "tool", "name": "add", "tool_call_id": "abcdefgh1", "content": '{"sum": 4}'}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}]
SAID = {"role": "assistant", "content": ANSWER}
EARLIER = [{"role": "user", "content": "Hello there."}, {"role": "assistant", "content": "Hello to you."}]
ROWS = {
    "one": {"prompt": [USER], "completion": [SAID]},
    "turns": {"prompt": [*EARLIER, USER], "completion": [SAID]},
    "system": {"prompt": [{"role": "system", "content": "Be brief."}, USER], "completion": [SAID]},
    "tools": {"prompt": [USER], "completion": [CALL], "tools": TOOLS},
    "chain": {"prompt": [USER], "completion": [CALL, RESULT, SAID], "tools": TOOLS},
    "reasoning": {"prompt": [USER], "completion": [{**SAID, "reasoning_content": "Two and two make four."}]},
    "prefill": {
        "prompt": [USER, {"role": "assistant", "content": "It is"}],
        "completion": [{"role": "assistant", "content": " four."}],
    },
}


def tokenizer_of(family: Family) -> PreTrainedTokenizerFast:
    """Return a tokenizer of one token a byte with the family's special tokens."""
    names = [*family.special, *family.added]
    vocabulary = {text: i for i, text in enumerate([*names, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in family.special])
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in family.added])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=family.bos,
        eos_token=family.eos,
        chat_template=family.template,
        clean_up_tokenization_spaces=False,
    )


def tokenize(family: Family, name: str, with_stops: bool = True) -> TokenizedRow | BadRow:
    tokenizer = tokenizer_of(family)
    stops = tokenizer.convert_tokens_to_ids(list(family.stops)) if with_stops else ()
    row_tokenizer = RowTokenizer(tokenizer, end_token_ids=stops, template_date=DAY)
    settings = RowSettings(chat_template_kwargs=family.kwargs)
    rows = RowReader(settings, row_tokenizer.template).read("f:1", "f", {**ROWS[name], "label": True})
    return row_tokenizer.tokenize(rows)[0]


def decode(tokenizer, ids) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("name", FAMILIES)
def test_one_turn_reads_as_the_family_writes_it(name):
    family = FAMILIES[name]
    tokenizer = tokenizer_of(family)
    for with_stops in (True, False):  # generation_config may be missing
        row = tokenize(family, "one", with_stops)
        assert isinstance(row, TokenizedRow), row
        assert (decode(tokenizer, row.prompt_ids), decode(tokenizer, row.completion_ids)) == family.one_turn
        assert all(row.completion_mask)


@pytest.mark.parametrize("form", ROWS)
@pytest.mark.parametrize("name", FAMILIES)
def test_prompts_are_generation_s_and_completions_end_where_it_stops(name, form):
    family, record = FAMILIES[name], ROWS[form]
    row = tokenize(family, form)
    if form in family.refused:
        assert isinstance(row, BadRow)
        assert row.kind == family.refused[form], row
        return
    assert isinstance(row, TokenizedRow), row
    tokenizer = tokenizer_of(family)
    tokenizer.chat_template = dated(family.template)
    settings = {"tools": record.get("tools"), "tokenize": False, **family.kwargs}
    is_prefilled = form == "prefill"
    begun = {"continue_final_message": True} if is_prefilled else {"add_generation_prompt": True}
    generated = tokenizer.apply_chat_template(with_text_arguments(family, record["prompt"]), **begun, **settings)
    prompt, completion = decode(tokenizer, row.prompt_ids), decode(tokenizer, row.completion_ids)
    assert row.template_differs == (form in family.differs)
    if row.template_differs:
        assert generated.startswith(prompt)
    else:
        assert row.prompt_ids == tokenizer(generated, add_special_tokens=False)["input_ids"]
    # What is scored ends with a token that generation stops at, which stands nowhere before but at other turns' ends.
    stops = set(tokenizer.convert_tokens_to_ids(list(family.stops))) | {tokenizer.eos_token_id}
    turns = scored_turns(row)
    assert len(turns) == sum(message["role"] == "assistant" for message in record["completion"])
    for turn in turns:
        assert turn[-1] in stops
        assert not stops & set(turn[:-1])
    assert "sum" not in decode(tokenizer, [i for turn in turns for i in turn])
    # And the text is the template's own, up to an EOS that it does not write.
    given = record["prompt"][:-1] if is_prefilled else record["prompt"]
    answer = [SAID] if is_prefilled else record["completion"]
    whole = tokenizer.apply_chat_template(with_text_arguments(family, [*given, *answer]), **settings)
    if form in family.closed:
        assert "closed block" in row.notes
        whole = prompt + whole[whole.index(completion) :]
    assert whole.startswith((prompt + completion).removesuffix(family.eos))


def scored_turns(row: TokenizedRow) -> list[list[int]]:
    turns: list[list[int]] = [[]]
    for token_id, is_scored in zip(row.completion_ids, row.completion_mask, strict=True):
        if is_scored:
            turns[-1].append(token_id)
        elif turns[-1]:
            turns.append([])
    return turns


def dated(template: str) -> str:
    """Return the template with the dates that it asks for written out by hand."""
    for form, text in {
        "%d %b %Y": "03 Feb 2024",
        "%Y-%m-%d": DAY,
        "%B %d, %Y": "February 03, 2024",
        "%d %B %Y": "03 February 2024",
    }.items():
        template = template.replace(f"strftime_now('{form}')", f"'{text}'")
    return template


def with_text_arguments(family: Family, messages: list[dict]) -> list[dict]:
    """Return the messages with arguments as JSON text where the template joins them to text."""
    if "+ c.function.arguments +" not in family.template:
        return messages
    call = {"id": "abcdefgh1", "type": "function", "function": {"name": "add", "arguments": '{"first": "two"}'}}
    return [{**message, "tool_calls": [call]} if "tool_calls" in message else message for message in messages]


@pytest.mark.parametrize("thoughts", ["<think>\nTwo and two.\n</think>\n\n", "<think>Two and two.</think>"])
def test_thoughts_that_r1_s_template_takes_out_of_an_answer_are_kept_where_generation_begins_with_them(thoughts):
    family = FAMILIES["deepseek r1"]
    tokenizer = tokenizer_of(family)
    answer = [{"role": "assistant", "content": thoughts + ANSWER}]
    (row,) = RowTokenizer(tokenizer).tokenize([Row("f:1", [USER], answer, True)])
    assert isinstance(row, TokenizedRow), row
    generated = tokenizer.apply_chat_template([USER], add_generation_prompt=True, return_dict=False)
    assert row.prompt_ids == generated
    rest = thoughts.removeprefix("<think>").removeprefix("\n")
    assert decode(tokenizer, row.completion_ids) == rest + ANSWER + family.eos
    assert (row.template_differs, row.notes) == (False, ("thoughts kept",))
