"""A run whose updates change nothing says so, once."""

import logging
from dataclasses import dataclass

import numpy as np
import pytest

from openkto.report.metrics import BatchRows
from openkto.report.standstill import Standstill
from tests.ranks import run_ranks
from tests.tiny import make_trainer, quiet_args, token_rows


@dataclass
class Step:
    learning_rate: float
    reward: float = 0.0
    grad_norm: float = 1.0
    applied: bool = True

    @property
    def rows(self):
        ratio_N = np.array([0.0, self.reward])
        return BatchRows(ratio_N, ratio_N, ratio_N > 0, np.ones(2), np.ones(2), 0.0, 0.0)


WARM_UP = [Step(rate) for rate in (0.1, 0.2, 0.3)]


def said(steps, caplog):
    caplog.clear()
    watch = Standstill()
    with caplog.at_level(logging.WARNING, logger="openkto"):
        for number, step in enumerate(steps, start=1):
            watch.see(number, step)
    return [record.getMessage() for record in caplog.records]


def test_rewards_of_0_are_said_once_they_stay_so_after_warm_up(caplog):
    still = [Step(0.3) for _ in range(20)]
    (line,) = said([*WARM_UP, *still], caplog)
    assert line.startswith("warning: step 8: all rewards have been exactly 0 in 5 steps")
    assert "Raise --learning_rate, which is 0.3 now" in line
    moved = [Step(0.3), Step(0.3), Step(0.3), Step(0.3), Step(0.3, reward=1e-9)]
    assert said([*WARM_UP, *moved, *moved], caplog) == []


@pytest.mark.parametrize(("step", "count"), [(Step(0.3, 1.0, 0.0), 1), (Step(0.3, 1.0, 0.0, applied=False), 0)])
def test_a_gradient_of_0_is_said_at_once(step, count, caplog):
    lines = said([*WARM_UP, step, step], caplog)
    assert len(lines) == count
    assert all(line.startswith("warning: step 4: grad_norm is 0, so nothing is learned.") for line in lines)


def warnings_of_a_run(folder, rate):
    lines = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("openkto").addHandler(handler)
    trainer, _ = make_trainer(token_rows([True, False] * 8), steps=8, lr=rate)
    trainer.fit(quiet_args(folder, 8))
    return [line for line in lines if "all rewards have been exactly 0" in line]


@pytest.mark.parametrize(("rate", "count"), [(1e-30, 1), (1e-3, 0)])
def test_the_loop_says_that_a_rate_reaches_no_weight(tmp_path, rate, count):
    ((lines),) = run_ranks(warnings_of_a_run, 1, tmp_path, str(tmp_path / "out"), rate)
    assert len(lines) == count
