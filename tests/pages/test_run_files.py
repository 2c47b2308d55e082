import json

import pytest

from openkto.errors import ConfigError
from openkto.pages.run_files import read_run, run_until, with_distinct_names
from tests.pages.made_runs import learning_run, start, summary, train_line, write_run


def test_a_step_that_was_made_again_counts_as_it_was_made_last(tmp_path):
    lines = [start(), train_line(1, loss=0.9), train_line(2, loss=0.8), start(step=1), train_line(2, loss=0.7)]
    run = read_run(write_run(tmp_path, lines))
    assert [(line["step"], line["loss"]) for line in run.train] == [(1, 0.9), (2, 0.7)]
    assert len(run.starts) == 2


def test_the_summary_of_an_early_end_is_none_once_the_run_was_resumed(tmp_path):
    lines = [start(4), train_line(1), train_line(2), summary(2), start(4, step=2), train_line(3)]
    assert read_run(write_run(tmp_path, lines)).summary is None
    assert read_run(write_run(tmp_path, [*lines, train_line(4), summary(4)])).summary == summary(4)


def test_the_run_of_a_checkpoint_is_what_it_was_at_its_step(tmp_path):
    run = run_until(read_run(learning_run(tmp_path, steps=8)), 6)
    assert [line["step"] for line in run.train] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in run.evaluations["eval"]] == [4]
    assert run.rewards is not None
    assert run.rewards.step.max() == 6
    assert len(run.rewards.reward) == len(run.rewards.margin) == 24
    assert run.total_steps == 8


def test_a_line_that_a_kill_cut_short_is_counted_and_the_others_are_read(tmp_path):
    write_run(tmp_path, [start(), train_line(1)])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 2, "lo')
    run = read_run(tmp_path)
    assert [line["step"] for line in run.train] == [1]
    assert run.problems == ["metrics.jsonl: 1 lines could not be read"]


def test_settings_that_cannot_be_read_are_said_and_the_curves_stay(tmp_path):
    write_run(tmp_path, [start(), train_line(1)])
    (tmp_path / "run.yaml").write_bytes(b"\xff\xfe")
    run = read_run(tmp_path)
    assert run.settings == {}
    assert len(run.train) == 1
    assert "run.yaml could not be read" in run.problems[0]


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="must be the --save_path of a run; got a folder without metrics"):
        read_run(tmp_path)
    with pytest.raises(ConfigError, match="got no such folder"):
        read_run(tmp_path / "nothing")


def test_sets_are_kept_apart_by_their_names(tmp_path):
    lines = [start(), train_line(1)]
    lines += [{"kind": "eval", "step": 1, "eval_set": name, "loss": loss} for name, loss in (("a", 0.1), ("b", 0.2))]
    run = read_run(write_run(tmp_path, lines))
    assert {name: found[0]["loss"] for name, found in run.evaluations.items()} == {"a": 0.1, "b": 0.2}


def test_rewards_come_with_their_margin_to_the_point_of_their_step(tmp_path):
    write_run(tmp_path, [start(), train_line(1)])
    line = {"step": 1, "rows": [5, 9], "desirable": [True, False], "rewards": [0.5, 0.25], "point": 0.1}
    cut = '{"step": 2, "rows": [5, '
    (tmp_path / "rewards.jsonl").write_text(json.dumps(line) + "\n" + cut)
    rewards = read_run(tmp_path).rewards
    assert rewards.row.tolist() == [5, 9]
    assert rewards.margin.tolist() == pytest.approx([0.4, -0.15])


def test_runs_of_equal_folder_names_are_told_apart_by_their_paths(tmp_path):
    runs = [read_run(learning_run(tmp_path / name / "out", 4)) for name in ("a", "b")]
    assert with_distinct_names(runs) == ["a/out", "b/out"]
    assert with_distinct_names(runs[:1]) == ["out"]
