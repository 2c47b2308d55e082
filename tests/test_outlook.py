"""What is said of a run's steps before it starts, and the warnings where they cannot teach the model much."""

import json

import numpy as np
import pytest

from openkto.commands.data import check_has_metric, evaluation_sets, training_set, warn_of_shared_prompts
from openkto.commands.outlook import (
    collisions,
    describe_checkpoints,
    describe_steps,
    describe_tokens,
    num_repeated,
    outlook_warnings,
)
from openkto.config import from_flat, with_resolved
from openkto.data.dataset import UnpairedPreferenceDataset
from openkto.errors import DataError
from tests.text_rows import byte_tokenizer, write_rows


def run(**changes):
    return from_flat({"pretrain": "m", "learning_rate": 1e-6, **changes})


def test_the_steps_are_those_of_the_rows_not_of_the_flag():
    assert describe_steps(run(), 96) == (
        "steps: 1, 1 epoch of 96 rows, 96 rows a step, 1 of warm-up, learning rate up to 1e-06"
    )
    assert describe_steps(run(train_batch_size=8, max_epochs=3, lr_warmup_ratio=0.1), 100) == (
        "steps: 39, 3 epochs of 100 rows, 4 to 8 rows a step, 4 of warm-up, learning rate up to 1e-06"
    )
    assert describe_steps(run(), 1).startswith("steps: 1, 1 epoch of 1 row, 1 row a step, 1 of warm-up")
    assert describe_steps(run(train_batch_size=8, max_steps=20, lr_scheduler="constant"), 80) == (
        "steps: 20, 2 epochs of 80 rows, 8 rows a step, 0 of warm-up, learning rate up to 1e-06"
    )


def test_it_is_said_when_checkpoints_are_saved_and_where():
    assert describe_checkpoints(run()) == "checkpoints: after each epoch, at the end, in ckpt/checkpoints"
    timed = run(save_steps=10, save_every_minutes=30.0, ckpt_path="else")
    assert describe_checkpoints(timed) == "checkpoints: every 10 steps, every 30 minutes, at the end, in else"
    assert describe_checkpoints(run(save_steps=0)).startswith("checkpoints: when the run is stopped early, in ")
    assert describe_checkpoints(run(disable_ds_ckpt=True)) == "checkpoints: none (--disable_ds_ckpt)"
    assert describe_checkpoints(run(disable_ds_ckpt=True, save_hf_ckpt=True)).startswith("checkpoints: after each")


def warned(num_rows, **changes):
    return outlook_warnings(run(**changes), num_rows)


def test_few_steps_are_warned_of_with_flags_that_make_twenty():
    assert warned(96) == [
        "the run has 1 step; with fewer than 20 the model hardly changes. Pass --train_batch_size 8 --max_epochs 2, "
        "for example, "
        "or give more rows."
    ]
    assert warned(96, train_batch_size=8, max_epochs=2) == []
    (line,) = warned(1000)
    assert line.endswith("Pass --train_batch_size 50, for example, or give more rows.")
    assert warned(1000, train_batch_size=50) == []
    (line,) = warned(1000, max_steps=19)  # an epoch has 4
    assert line == "the run has 19 steps; with fewer than 20 the model hardly changes. Raise --max_steps."
    (line,) = warned(1000, max_steps=19, train_batch_size=8)
    assert line.endswith("the model hardly changes. Raise --max_steps, or leave it out.")
    assert warned(1000, max_steps=20) == []


def test_a_patience_that_the_run_is_too_short_for_is_warned_of():
    (line,) = warned(960, train_batch_size=8, early_stop_patience=2, eval_steps=60)
    assert line == (
        "--early_stop_patience 2: the run has 2 evaluations, so it cannot end early. Lower it or --eval_steps."
    )
    assert warned(960, train_batch_size=8, early_stop_patience=2, eval_steps=59) == []
    assert len(warned(960, train_batch_size=8, early_stop_patience=2, max_epochs=2)) == 1
    assert warned(960, train_batch_size=8, early_stop_patience=2, max_epochs=3) == []


@pytest.mark.parametrize(("scheduler", "is_zero"), [("linear", True), ("cosine", True), ("cosine_with_min_lr", False)])
def test_a_run_whose_every_step_has_rate_0_trains_nothing(scheduler, is_zero):
    lines = warned(96, max_steps=1, lr_scheduler=scheduler, lr_warmup_ratio=0.0)
    told = f"--lr_scheduler {scheduler}: the learning rate of all steps is 0, so nothing is trained."
    assert any(line.startswith(told) for line in lines) is is_zero


def test_the_metric_to_keep_needs_its_classes_in_the_evaluation_set(tmp_path):
    rows = tmp_path / "chosen.jsonl"
    rows.write_text('{"prompt": "p", "completion": " c", "label": true}\n')
    sets = {"e": UnpairedPreferenceDataset(rows, byte_tokenizer(), cache_dir=tmp_path)}
    for metric in ("loss", "rewards/accuracy", "rewards/chosen", None):
        check_has_metric(metric, sets)
    for metric in ("rewards/auc", "rewards/margins", "rewards/rejected"):
        with pytest.raises(DataError) as raised:
            check_has_metric(metric, sets)
        assert str(raised.value) == (
            f"--keep_best {metric}: needs undesirable rows in the evaluation set e; got none. Add some, or follow loss."
        )


def test_a_reference_point_of_few_rows_is_warned_of_by_how_many_there_are():
    (line,) = warned(200, train_batch_size=4)
    assert line.startswith("z_ref of a step is a mean over 4 mismatched pairs, mostly chance below 8. Raise --train_b")
    few = warned(6, max_steps=50)
    assert few == [
        "z_ref of a step is a mean over 6 mismatched pairs, mostly chance below 8. Add rows, or take --loss_type "
        "apo_zero_unpaired."
    ]
    assert warned(200, train_batch_size=8) == []
    assert warned(200, train_batch_size=4, loss_type="bco") == []


def test_an_evaluation_set_of_few_rows_is_warned_of_likewise(tmp_path, caplog):
    for loss_type in ("kto", "bco"):
        write_rows(tmp_path / "held.jsonl", 7)
        config = run(eval_dataset=[f"{tmp_path}/held.jsonl"], data_cache_dir=str(tmp_path), loss_type=loss_type)
        evaluation_sets(config, byte_tokenizer())
    (line,) = [record.getMessage() for record in caplog.records if "is a mean over" in record.getMessage()]
    assert line == (
        "warning: z_ref of the evaluation set held is a mean over 7 mismatched pairs, mostly chance below 8. Add rows "
        "to it."
    )


def test_a_set_with_prompts_that_are_trained_on_is_warned_of_in_whatever_file_it_stands(tmp_path, caplog):
    def ask(i, said):
        return {"prompt": f"Is {i} even?", "completion": said, "label": i % 2 == 0}

    files = {"rows": [ask(i, " yes") for i in range(12)], "other": [ask(i, " no") for i in range(9, 19)]}
    files["new"] = [ask(i, " yes") for i in range(20, 30)]
    for name, rows in files.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = run(
        dataset=[f"{tmp_path}/rows.jsonl"],
        eval_dataset=[f"same={tmp_path}/rows.jsonl", f"{tmp_path}/other.jsonl", f"{tmp_path}/new.jsonl"],
        data_cache_dir=str(tmp_path / "cache"),
    )
    warn_of_shared_prompts(training_set(config, byte_tokenizer()), evaluation_sets(config, byte_tokenizer()))
    say = (
        "warning: the evaluation set {}: {} of its {} rows have a prompt that is trained on, so its numbers say "
        "little of other prompts. Leave such rows out, or hold rows out with --eval_fraction."
    )
    said = [record.getMessage() for record in caplog.records if "is trained on" in record.getMessage()]
    assert said == [say.format("same", 12, 12), say.format("other", 3, 10)]


def test_a_set_of_which_one_text_is_over_half_is_warned_of_with_a_cure_that_can_help(tmp_path, caplog):
    rows = [{"prompt": f"Is {max(i, 5)} even?", "completion": f" {i}", "label": i % 2 == 0} for i in range(10)]
    path = tmp_path / "rows.jsonl"  # six rows of one prompt, so that two of ten pairs keep it
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = (
        "hold a row's own prompt or completion, whoever is paired with whom, since one text stands in over half of {}: "
        "z_ref takes in the rows' own rewards. "
    )
    sets = {"dataset": [str(path)], "eval_dataset": [f"held={path}"], "data_cache_dir": str(tmp_path / "cache")}
    evaluation_sets(run(**sets), byte_tokenizer())
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert line == (
        "warning: 2 of 10 mismatched pairs of the evaluation set held (20.0%) " + said.format("it")
        + "Add more varied rows to it."
    )  # fmt: skip
    data = training_set(run(**sets), byte_tokenizer())
    whole, parts = (collisions(run(**sets, train_batch_size=n), data) for n in (10, 4))
    assert whole == [
        "2 of 10 mismatched pairs of an epoch (20.0%) " + said.format("a batch")
        + "More varied rows help; --loss_type apo_zero_unpaired needs no z_ref."
    ]  # fmt: skip
    assert "More varied rows help, and a larger --train_batch_size may; --loss_type" in parts[0]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"eval_dataset": ["{place}/one.jsonl"]}, "the evaluation set one ({place}/one.jsonl): z_ref is"),
        ({"eval_dataset": ["mine={place}/one.jsonl"]}, "the evaluation set mine ({place}/one.jsonl): z_ref is"),
        (
            {"eval_dataset": ['{"name": "mine", "path": "{place}/one.jsonl"}']},
            "the evaluation set mine ({place}/one.jsonl): z_ref is",
        ),
        ({"eval_fraction": 0.2, "seed": 7}, "--eval_fraction 0.2, the held-out rows: z_ref is"),
    ],
    ids=["file", "name", "mapping", "fraction"],
)
def test_an_evaluation_set_of_one_row_is_refused_as_it_is_read_and_not_warned_of(tmp_path, caplog, given, says):
    write_rows(tmp_path / "one.jsonl", 1)
    write_rows(tmp_path / "rows.jsonl", 6)
    filled = json.loads(json.dumps(given).replace("{place}", str(tmp_path)))
    config = run(dataset=[f"{tmp_path}/rows.jsonl"], data_cache_dir=str(tmp_path / "cache"), **filled)
    with pytest.raises(DataError) as raised:
        evaluation_sets(config, byte_tokenizer())
    assert str(raised.value).startswith(says.replace("{place}", str(tmp_path)))
    assert "got a set of one row. " in str(raised.value)
    assert [record for record in caplog.records if record.levelname == "WARNING"] == []
    assert evaluation_sets(with_resolved(config, loss_type="apo_zero_unpaired"), byte_tokenizer())


def test_a_fraction_that_leaves_one_row_to_train_on_is_refused_as_such(tmp_path):
    write_rows(tmp_path / "rows.jsonl", 6)
    config = run(dataset=[f"{tmp_path}/rows.jsonl"], data_cache_dir=str(tmp_path), eval_fraction=0.8, seed=7)
    with pytest.raises(
        DataError, match=r"--eval_fraction 0\.8, the rows to train on: .* Change the fraction or --seed"
    ):
        training_set(config, byte_tokenizer())


def test_the_tokens_of_an_epoch_are_counted_after_the_cut(tmp_path):
    rows = [{"prompt": "a" * n, "completion": "b" * 4, "label": True} for n in (2, 4, 30)]
    data = UnpairedPreferenceDataset(rows, byte_tokenizer(), 20, truncation="prompt", cache_dir=tmp_path)
    totals = np.minimum(data.prompt_lengths + data.completion_lengths, 20)
    assert describe_tokens(data) == (
        f"tokens: prompts {int(np.median(data.prompt_lengths))} in the median and {data.prompt_lengths.max()} at most, "
        f"completions 5 in the median and 5 at most; {totals.sum()} an epoch, with --max_len 20"
    )


def test_rows_that_repeat_another_are_counted(tmp_path):
    texts = [
        ("a", "x", True),
        ("a", "x", True),
        ("a", "x", False),
        ("a", "y", True),
        ("b", "x", True),
        ("a", "x", True),
    ]
    rows = [{"prompt": prompt, "completion": text, "label": label} for prompt, text, label in texts]
    assert num_repeated(UnpairedPreferenceDataset(rows, byte_tokenizer(), 99, cache_dir=tmp_path)) == 2
