"""Callbacks: every rank hears of every step, evaluation and checkpoint, with the numbers that are written down."""

from pathlib import Path

import pytest

from openkto.trainer import Callback, Services
from tests.helpers.records import lines
from tests.helpers.stand_in import plain_trainer
from tests.ranks import run_ranks
from tests.tiny import make_trainer, quiet_args, token_rows

RATES = {"samples_per_second", "tokens_per_second", "step_time_s", "padding_fraction", "peak_memory_gb", "num_tokens"}


class Recorder(Callback):
    """Writes down what it is told, and whether a checkpoint is whole by then."""

    def __init__(self) -> None:
        self.told: list[tuple] = []

    def on_step(self, step, values):
        self.told.append(("step", step, values))

    def on_evaluation(self, step, eval_set, values):
        self.told.append(("evaluation", step, eval_set, values))

    def on_save(self, step, folder):
        self.told.append(("save", step, Path(folder).name, (folder / "state.json").exists()))


def told_on_a_rank(folder: Path) -> list[tuple]:
    recorder = Recorder()
    trainer, _ = make_trainer(
        token_rows([True, False] * 4), batch=4, micro=2, steps=2, eval_rows=token_rows([True, False], seed=9),
        services=Services(callbacks=[recorder]),
    )  # fmt: skip
    trainer.fit(quiet_args(folder, 2, eval_steps=2, save_steps=1))
    return recorder.told


def test_every_rank_hears_the_same_and_what_is_written_down(tmp_path):
    told, others = run_ranks(told_on_a_rank, 2, tmp_path, tmp_path / "out")
    assert told == others
    assert [entry[:2] for entry in told] == [("step", 1), ("save", 1), ("step", 2), ("evaluation", 2), ("save", 2)]
    assert [entry[2:] for entry in told if entry[0] == "save"] == [("global_step1", True), ("global_step2", True)]
    written = [
        {name: value for name, value in line.items() if name not in RATES | {"kind", "step"}}
        for line in lines(tmp_path / "out", "train")
    ]
    assert [entry[2] for entry in told if entry[0] == "step"] == written
    (evaluation,) = lines(tmp_path / "out", "eval")
    (heard,) = [entry for entry in told if entry[0] == "evaluation"]
    assert heard[2] is None
    assert heard[3].items() <= evaluation.items()
    assert 0 < heard[3]["loss"] < 1


class Few(Callback):
    def on_step(self, step, values):
        values.clear()
        if step == 2:
            raise ValueError("enough")


def test_a_callback_needs_only_what_it_wants_to_hear_and_what_it_raises_ends_the_run(tmp_path):
    recorder = Recorder()
    trainer = plain_trainer(token_rows([True, False] * 6), batch=4, services=Services(callbacks=[Few(), recorder]))
    with pytest.raises(ValueError, match="enough"):
        trainer.fit(quiet_args(tmp_path / "out", 3, save_steps=1, logging_steps=3))
    # Each step by itself, whatever --logging_steps pools; and a dictionary of its own for each.
    (step, save) = recorder.told
    assert step[:2] == ("step", 1)
    assert step[2]["loss"] == pytest.approx(0.5)
    assert save[:2] == ("save", 1)
