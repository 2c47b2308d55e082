"""kill -9 at random moments, saves included: the same command, started again, makes the run that would have been."""

import random
import re
import signal
from pathlib import Path
from shutil import rmtree

import pytest

from tests.helpers.starts import Start, check_same, random_moment
from tests.text_rows import write_model, write_rows

KILLS = 10  # at each ZeRO stage


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_a_run_that_is_killed_at_random_moments_is_the_run_that_would_have_been(tmp_path, monkeypatch, zero_stage):
    monkeypatch.setenv("OPENKTO_CACHE", str(tmp_path / "cache"))
    write_model(tmp_path / "model")
    write_rows(tmp_path / "rows.jsonl", 40)
    write_rows(tmp_path / "eval.jsonl", 7)

    def start(out: Path) -> Start:
        argv = [
            "--pretrain", f"{tmp_path}/model", "--dataset", f"{tmp_path}/rows.jsonl", "--eval_dataset",
            f"{tmp_path}/eval.jsonl", "--save_path", str(out), "--load_checkpoint", "--train_batch_size", "4",
            "--max_epochs", "2", "--learning_rate", "1e-3", "--zero_stage", str(zero_stage), "--param_dtype", "fp32",
            "--save_steps", "4", "--eval_steps", "5", "--logging_steps", "3", "--max_ckpt_num", "2", "--log_batches",
            "--stall_minutes", "0.2",
        ]  # fmt: skip
        return Start(tmp_path, argv)

    whole, out = tmp_path / "whole", tmp_path / "killed"
    assert start(whole).statuses() == [0, 0]
    chance, kills, newest = random.Random(zero_stage), 0, 0
    while kills < KILLS or (out / "checkpoints").exists():
        run = start(out)
        if kills < KILLS:
            run.kill_at(random_moment(chance, out), chance.choice([[0], [1], [0, 1]]))
        statuses = run.statuses()
        kills += -signal.SIGKILL in statuses
        # A checkpoint that has its name is never lost: the next start goes on from it.
        went_on = re.search(r"resumed from .*global_step(\d+)", run.said())
        assert not went_on or int(went_on[1]) == newest
        assert "is not complete" not in run.said()
        newest = max((int(path.name[11:]) for path in out.glob("checkpoints/global_step*")), default=0)
        if statuses == [0, 0]:
            check_same(out, whole)
            rmtree(out)
            newest = 0
