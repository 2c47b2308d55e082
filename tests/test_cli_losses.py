"""The losses as a user asks for them: from flags and weighted rows to numbers, and the sentences on the way."""

import json
import logging

import pytest

from openkto.commands import evaluate, train
from openkto.commands.run import run
from tests.helpers.commands import flags
from tests.helpers.records import batches, lines
from tests.ranks import run_ranks
from tests.text_rows import write_model, write_rows

TERMS = ["--label_smoothing", "0.1", "--sft_loss_coef", "0.5"]


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENKTO_CACHE", str(tmp_path / "cache"))
    write_model(tmp_path / "model")
    for name, count in (("rows", 20), ("eval", 7)):
        path = write_rows(tmp_path / f"{name}.jsonl", count)
        weighted = [json.loads(line) | {"votes": i % 4} for i, line in enumerate(path.read_text().splitlines())]
        path.write_text("".join(json.dumps(row) + "\n" for row in weighted))
    return tmp_path


def test_weights_of_rows_terms_and_a_loss_reach_the_step_and_the_evaluation(place):
    more = ("--loss_type", "bco", "--weight_key", "votes", *TERMS)
    run_ranks(train.main, 2, place, flags(place, *more, "--log_batches"))
    out = place / "out"
    (first, *_) = lines(out, "train")
    rows = batches(out)[0]["rows"]
    votes = [row % 4 for row in rows]
    assert len(rows) == 8
    # Before the first update every row costs log 2, whatever its label is taken to be.
    assert first["loss"] == pytest.approx(sum(votes) / 8 * 0.6931472, rel=1e-5)
    assert first["rewards/shift"] == 0.0
    assert {"sft_loss", "rewards/shift"} <= lines(out, "train")[-1].keys()
    assert lines(out, "train")[-1]["rewards/shift"] != 0.0
    (end,) = lines(out, "eval")
    assert end["rewards/shift"] != lines(out, "train")[-1]["rewards/shift"]  # the last step's rows are in it
    argv = ["--config", f"{out}/run.yaml", "--pretrain", f"{out}", "--ref_pretrain", f"{place}/model"]
    run_ranks(evaluate.main, 1, place, [*argv, "--output", f"{place}/values.json"])
    values = json.loads((place / "values.json").read_text())["eval"]
    for name in ("sft_loss", "rewards/chosen", "rewards/auc", "logps/rejected"):
        assert values[name] == pytest.approx(end[name], rel=1e-4, abs=1e-4), name
    mean = (values["rewards/chosen"] * 4 + values["rewards/rejected"] * 3) / 7
    assert values["rewards/shift"] == pytest.approx(mean, rel=1e-6)


@pytest.mark.parametrize("loss_type", [pytest.param("kto_length_normalized", marks=pytest.mark.slow), "kto_humanline"])
def test_training_and_evaluating_say_the_same(place, loss_type):
    more = ("--loss_type", loss_type, "--weight_key", "votes", *TERMS)
    run_ranks(train.main, 2, place, flags(place, *more, "--zero_stage", "3"))
    (end,) = lines(place / "out", "eval")
    argv = ["--config", f"{place}/out/run.yaml", "--pretrain", f"{place}/out", "--ref_pretrain", f"{place}/model"]
    run_ranks(evaluate.main, 1, place, [*argv, "--output", f"{place}/values.json"])
    values = json.loads((place / "values.json").read_text())["eval"]
    for name in ("loss", "sft_loss", "kl", "kl_unclamped", "rewards/chosen", "rewards/rejected", "rewards/accuracy"):
        assert values[name] == pytest.approx(end[name], rel=1e-4, abs=1e-5), name


def check(argv, capsys):
    status = run(train.main, [*argv, "--check"])
    return status, capsys.readouterr().err


def test_a_bad_weight_is_one_sentence_with_file_and_line(place, capsys):
    with (place / "rows.jsonl").open("a") as file:
        file.write('{"prompt": "a", "completion": "b", "label": true, "votes": -3}\n')
    status, text = check(flags(place, "--weight_key", "votes"), capsys)
    assert status == 3
    assert (
        f"error: {place}/rows.jsonl:21: votes, the row's weight, must be a number, 0 or more; got -3. Fix the row, "
        "or pass --on_bad_rows skip to leave such rows out.\n"
    ) in text


def test_an_sft_term_without_desirable_rows_is_refused(place, capsys):
    lines = [json.loads(line) | {"label": False} for line in (place / "rows.jsonl").read_text().splitlines()]
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    status, text = check(flags(place, "--sft_loss_coef", "0.1"), capsys)
    assert status == 3
    assert (
        f"error: {place}/rows.jsonl: must hold desirable rows, which --sft_loss_coef needs; got none. Add some, or "
        "leave --sft_loss_coef out.\n"
    ) in text


def test_auto_counts_rows_with_their_weights(place, capsys, caplog):
    caplog.set_level(logging.INFO, logger="openkto")
    more = ("--weight_key", "votes", "--undesirable_loss_weight", "auto")
    assert check(flags(place, *more), capsys)[0] == 0
    # Rows 0 to 19 with votes i % 4; every third is undesirable.
    undesirable = sum(i % 4 for i in range(0, 20, 3))
    desirable = sum(i % 4 for i in range(20)) - undesirable
    assert f"desirable {desirable:.1f}, undesirable {undesirable:.1f}, ratio" in caplog.text
    assert f"({desirable / undesirable:g} * {undesirable:.1f}) = 1" in caplog.text
