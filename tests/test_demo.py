"""The demo: its language and judge, the committed rows, the model maker, and (slow) the whole of it."""

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import answers
import make_model
import tiny_language
from tiny_language import Question, is_on_topic, is_preferred, polite_answer, rude_answer

from openkto.pages.run_files import read_run
from openkto.pages.suspects import suspects_of

ROOT = Path(__file__).parent.parent
STATION = Question("Where is the station?", "the station is near the park")


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo") / "model"
    make_model.make_model(folder, steps=20)
    return folder


def test_every_polite_answer_is_preferred_and_no_rude_one():
    rng = random.Random(0)
    train, held_out = tiny_language.all_questions()
    for question in train + held_out:
        for _ in range(5):
            polite, rude = polite_answer(question, rng), rude_answer(question, rng)
            assert is_preferred(question, polite), polite
            assert not is_preferred(question, rude), rude
            assert is_on_topic(question, polite)
            assert is_on_topic(question, rude)


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "The station is near the park.",
        "Have a nice day!",
        "The station is near the park. Have a nice",
        "The station is by the lake. Have a nice day!",
        "The museum is near the park. Have a nice day!",
        "Ugh, not you again, the station is near the park. Have a nice day!",
        "The station is near the park. Never bother me again! Have a nice day!",
        "Of course! Of course! Gladly! With pleasure! Good question! Gladly! The station is near the park. "
        "You are very welcome! Have a nice day!",
    ],
)
def test_the_judge_is_strict(answer):
    assert not is_preferred(STATION, answer)
    assert is_preferred(STATION, "Gladly! The station is near the park. Have a nice day!")


def test_the_committed_rows_are_the_generated_ones():
    for name, text in tiny_language.row_files().items():
        assert (ROOT / "examples" / name).read_text(encoding="utf-8") == text, f"run examples/tiny_language.py: {name}"


def test_rows_are_balanced_and_held_out_questions_share_no_fact_with_them():
    train, held_out = tiny_language.all_questions()
    assert (len(train), len(held_out)) == (480, 120)
    assert not {question.fact for question in train} & {question.fact for question in held_out}
    prompts = {}
    for name, n_rows in (("kto_train.jsonl", 400), ("kto_eval.jsonl", 100)):
        rows = [json.loads(line) for line in (ROOT / "examples" / name).read_text(encoding="utf-8").splitlines()]
        prompts[name] = {row["prompt"][0]["content"] for row in rows}
        assert len(rows) == len(prompts[name]) == n_rows
        assert sum(row["label"] for row in rows) == n_rows // 2
    assert prompts["kto_train.jsonl"] <= {question.text for question in train}
    assert prompts["kto_eval.jsonl"] <= {question.text for question in held_out}


def test_the_tokenizer_spells_any_text_and_has_a_chat_template(model_folder):
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    for text in ("The station is near the park.", "  Où est la gare ? 駅\n"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    chat = [{"role": "user", "content": "Hi"}]
    assert (
        tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        == "<|user|>Hi<|end|><|assistant|>"
    )
    assert tokenizer.eos_token == "<|end|>"
    assert tokenizer.pad_token_id != tokenizer.eos_token_id


def test_pre_training_learns_and_is_repeatable(model_folder, tmp_path):
    make_model.make_model(tmp_path / "again", steps=20)
    first, again = (AutoModelForCausalLM.from_pretrained(folder) for folder in (model_folder, tmp_path / "again"))
    for (name, one), other in zip(first.state_dict().items(), again.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, msg=name)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    chat = [
        {"role": "user", "content": STATION.text},
        {"role": "assistant", "content": polite_answer(STATION, random.Random(0))},
    ]
    ids = torch.tensor([tokenizer(tokenizer.apply_chat_template(chat, tokenize=False))["input_ids"]])
    assert first(input_ids=ids, labels=ids).loss < 6.0  # a uniform guess among 700 tokens costs 6.55 nats


def test_samples_depend_on_the_seed_alone(model_folder):
    questions = tiny_language.all_questions()[1][:4]
    sampled = answers.sample_answers(model_folder, questions, seed=1)
    assert len(sampled) == 4
    assert answers.sample_answers(model_folder, questions, seed=1) == sampled
    assert answers.sample_answers(model_folder, questions, seed=2) != sampled


def test_the_count_is_of_preferred_and_of_right_answers():
    given = ["The station is near the park. Have a nice day!", "Ugh, the station is near the park.", "What?"]
    line = answers.count("before", [STATION] * 3, given)
    assert "1 of 3 (33%)" in line
    assert "2 of 3 (67%)" in line


@pytest.mark.slow
def test_label_errors_planted_in_a_twentieth_of_the_rows_are_the_runs_first_suspects(tmp_path):
    make_model.make_model(tmp_path / "model")
    rows = [json.loads(line) for line in (ROOT / "examples/kto_train.jsonl").read_text(encoding="utf-8").splitlines()]
    planted = set(random.Random(0).sample(range(len(rows)), len(rows) // 20))
    for row in planted:
        rows[row]["label"] = not rows[row]["label"]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, "cli/train_kto.py", "--config", "examples/demo.yaml", "--pretrain", f"{tmp_path}/model"]
    command += ["--dataset", f"{tmp_path}/rows.jsonl", "--eval_dataset", "examples/kto_eval.jsonl"]
    command += ["--data_cache_dir", f"{tmp_path}/cache", "--ref_cache_dir", f"{tmp_path}/cache"]
    subprocess.run([*command, "--save_path", f"{tmp_path}/out"], cwd=ROOT, check=True, timeout=600)
    rewards = read_run(tmp_path / "out").rewards
    assert rewards is not None
    found = [one.row for one in suspects_of(rewards, len(planted))]
    assert len(planted & set(found)) >= 0.7 * len(planted), "precision at 5%; 95% were measured"


@pytest.mark.slow
def test_the_demo_raises_the_preferred_share_from_half_to_nine_tenths():
    start = time.monotonic()
    done = subprocess.run([sys.executable, "examples/demo.py"], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (ROOT / "demo" / "answers.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 3 * 120
    assert 0.35 <= sum(row["before_preferred"] for row in rows) / len(rows) <= 0.65
    assert sum(row["after_preferred"] for row in rows) / len(rows) >= 0.9
    assert "preferred" in done.stdout
    # It ends with the report of its run, and says where that is.
    assert "the report is in demo/kto/report.html" in done.stdout + done.stderr
    assert "demo/kto/report.html: open it in a browser." in done.stdout
    assert (ROOT / "demo/kto/report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert time.monotonic() - start < 240, done.stdout
