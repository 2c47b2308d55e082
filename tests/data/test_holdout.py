"""Which rows are held out depends on the seed and the prompt only."""

import json
from dataclasses import replace

import numpy as np
import pytest

from openkto.data.holdout import (
    DIGEST,
    HeldOut,
    SplitFile,
    count_prompts,
    halves,
    is_held_out,
    prompt_digest,
    read_split,
)
from openkto.errors import DataError
from tests.helpers.datasets import dataset_of
from tests.text_rows import byte_tokenizer

FRACTION, SEED = 0.3, 5


def rows(count, first=0):
    """Return two answers to each question, with both labels."""
    return [
        {"prompt": f"What is {i // 2}?", "completion": f" Number {i}.", "label": i % 2 == 0}
        for i in range(2 * first, 2 * (first + count))
    ]


def side(source, is_training, tokenizer=None, fraction=FRACTION, seed=SEED, **settings):
    choice = HeldOut(fraction, seed, is_training)
    return dataset_of(source, tokenizer or byte_tokenizer(), choice=choice, **settings)


def expected(count, fraction=FRACTION, seed=SEED):
    """Return the rows of the questions that the seed draws, one by one."""
    drawn = [is_held_out(prompt_digest(f"What is {i}?"), fraction, seed) for i in range(count)]
    return [row for i in range(count) if drawn[i] for row in (2 * i, 2 * i + 1)]


# ---- the draw -------------------------------------------------------------------------------------------------------


def test_prompts_that_ask_the_same_are_one_and_others_are_not():
    same = ["What is\n two?", "what is two? ", "ＷHAT is two?", [{"role": "user", "content": "What is two?"}]]
    assert len({prompt_digest(prompt) for prompt in same}) == 1
    system = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is two?"}]
    others = ["What is two", "What is too?", system, [*system, {"role": "assistant", "content": "2"}], "\ud800"]
    assert len({prompt_digest(prompt) for prompt in [same[0], *others]}) == 6


@pytest.mark.parametrize("fraction", [0.05, 0.5, 0.9])
def test_the_fraction_is_that_of_the_prompts(fraction):
    digests = [prompt_digest(str(i)) for i in range(10_000)]
    count = sum(is_held_out(digest, fraction, 42) for digest in digests)
    assert abs(count - 10_000 * fraction) < 4 * (10_000 * fraction * (1 - fraction)) ** 0.5
    # Another seed draws others: both are drawn as often as two independent draws are.
    both = sum(is_held_out(d, fraction, 42) and is_held_out(d, fraction, 43) for d in digests)
    assert abs(both - 10_000 * fraction**2) < 4 * (10_000 * fraction**2 * (1 - fraction**2)) ** 0.5


def test_a_larger_fraction_holds_out_what_a_smaller_one_did():
    digests = [prompt_digest(str(i)) for i in range(200)]
    small, large = ({d for d in digests if is_held_out(d, fraction, 1)} for fraction in (0.1, 0.4))
    assert small < large


# ---- in a data set --------------------------------------------------------------------------------------------------


def test_rows_of_a_prompt_stay_together_and_each_row_is_on_one_side():
    training, held_out = side(rows(20), True), side(rows(20), False)
    assert held_out.rows.tolist() == expected(20)
    assert sorted([*training.rows, *held_out.rows]) == list(range(40))
    assert 0 < len(held_out) < 40
    assert training.report.kept == len(training)
    assert (held_out.report.desirable, held_out.report.undesirable) == (len(held_out) // 2,) * 2


def test_no_setting_and_no_further_row_moves_a_row(tmp_path):
    chosen = expected(20)
    pairs = [{"prompt": f"What is {i}?", "chosen": " It.", "rejected": " What?"} for i in range(20)]
    messages = [
        {"prompt": [{"role": "user", "content": row["prompt"]}], "completion": row["completion"].strip(), "label": True}
        for row in rows(20)
    ]
    bare = byte_tokenizer()
    bare.chat_template = None
    assert side(rows(20), False, max_len=40, truncation="prompt").rows.tolist() == chosen
    assert side(rows(20), False, apply_chat_template=False).rows.tolist() == chosen
    assert side(rows(20), False, bare).rows.tolist() == chosen
    assert side(rows(20), False, max_samples=30).rows.tolist() == [row for row in chosen if row < 30]
    assert side(pairs, False).rows.tolist() == chosen
    assert side(messages, False).rows.tolist() == chosen
    assert side(rows(30), False).rows.tolist()[: len(chosen)] == chosen
    first = tmp_path / "first.jsonl"
    first.write_text("".join(json.dumps(row) + "\n" for row in rows(5, first=50)))
    second = tmp_path / "second.jsonl"
    second.write_text("".join(json.dumps(row) + "\n" for row in rows(20)))
    assert [row - 10 for row in side([first, second], False).rows.tolist() if row >= 10] == chosen


def test_a_mixture_draws_no_row_that_is_held_out(tmp_path):
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for path, first in zip(paths, (0, 20), strict=True):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows(20, first)))
    training = side(paths, True, dataset_probs=[0.8, 0.2])
    held_out = side(paths, False)
    assert len(training) > 80 - len(held_out), "rows are drawn more than once"
    assert set(training.rows.tolist()) | set(held_out.rows.tolist()) == set(range(80))
    assert not set(training.rows.tolist()) & set(held_out.rows.tolist())


@pytest.mark.parametrize(
    ("prompts", "fraction", "held_out", "cure"),
    [
        (3, 1e-9, 0, "Change the fraction or --seed, or add rows."),
        (3, 0.999999999, 3, "Change the fraction or --seed, or add rows."),
        (1, 0.999999999, 1, "Add rows with other prompts."),
    ],
)
def test_a_fraction_that_leaves_a_side_empty_is_one_sentence(prompts, fraction, held_out, cure):
    for is_training in (True, False):
        with pytest.raises(DataError) as raised:
            side(rows(prompts), is_training, fraction=fraction)
        assert str(raised.value) == (
            f"rows: --eval_fraction {fraction:g} must leave a prompt to evaluate on and one to train on; got "
            f"{held_out} of {prompts} prompts held out. {cure}"
        )


# ---- the file -------------------------------------------------------------------------------------------------------


@pytest.fixture
def split():
    held_out = side(rows(20), False)
    prompts = [digest.tobytes().hex() for digest in held_out.prompt_digests()]
    return SplitFile(SEED, FRACTION, ["rows.jsonl"], "train", None, None, 100, "error", held_out.rows.tolist(), prompts)


def test_the_file_gives_the_same_rows_back_also_when_others_were_added(tmp_path, split):
    path = tmp_path / "eval_split.json"
    path.write_text(split.to_json())
    again = read_split(str(path))
    assert again == split
    assert dataset_of(rows(30), byte_tokenizer(), choice=again).rows.tolist() == expected(20)
    assert read_split(str(tmp_path / "rows.jsonl")) is None


def test_other_data_than_the_files_is_one_sentence(tmp_path, split):
    with pytest.raises(DataError) as raised:
        dataset_of(rows(20, first=1), byte_tokenizer(), choice=split)
    shown = ", ".join(map(str, expected(20)[:5]))
    assert str(raised.value) == (
        f"rows: must hold the rows that eval_split.json names; got other or no prompts in rows {shown} and more, "
        f"{len(expected(20))} of {len(expected(20))}. Give the data that the run held them out of."
    )
    path = tmp_path / "eval_split.json"
    for content in ("[1]", "{", json.dumps({"rows": [1]}), replace(split, rows=["1"]).to_json()):
        path.write_text(content)
        with pytest.raises(DataError, match="must be the file of held-out rows that a run with --eval_fraction wrote"):
            read_split(str(path))


def test_a_mask_is_in_the_order_of_the_rows(split):
    digests = np.array([prompt_digest(row["prompt"]) for row in rows(20)][::-1], dtype=DIGEST)
    mask = split.mask("rows", np.arange(40)[::-1], digests)
    assert np.arange(40)[::-1][mask].tolist() == expected(20)[::-1]


def test_the_halves_of_digests_are_numbers_that_tell_them_apart():
    digests = np.frombuffer(b"\x01" + bytes(15) + b"\x02" + bytes(15) + bytes(8) + b"\x01" * 8, dtype=DIGEST)
    assert halves(digests).tolist() == [1, 2, 0]
    assert count_prompts(digests[[0, 1, 1]]) == 2
