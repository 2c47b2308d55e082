"""The progress display: lines in a log, a bar on a terminal."""

import io
import logging
import os
import re

import pytest

from openkto.report.progress import Progress

METRICS = {"loss": 0.48768, "rewards/margins": 0.0123, "samples_per_second": 12.34, "kl": 1.0}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_without_a_terminal_each_update_is_a_log_line(caplog):
    caplog.set_level(logging.INFO)
    progress = Progress(total_steps=300, stream=io.StringIO())
    progress.update(12, METRICS)
    progress.close()
    (record,) = caplog.records
    pattern = r"step 12/300: loss 0\.4877, margin 0\.0123, samples/s 12\.34, \d+:\d\d:\d\d left"
    assert re.fullmatch(pattern, record.message)


def test_a_terminal_without_columns_shows_lines_in_place_of_a_bar_that_nobody_sees(caplog):
    caplog.set_level(logging.INFO)
    reader, writer = os.openpty()
    with open(reader, "rb", buffering=0), open(writer, "w") as terminal:
        assert (terminal.isatty(), os.get_terminal_size(writer).columns) == (True, 0)
        Progress(total_steps=300, stream=terminal).update(12, METRICS)
    assert caplog.records[0].message.startswith("step 12/300: loss 0.4877")


def test_time_left_is_that_of_the_steps_left(caplog, monkeypatch):
    clock = iter([100.0, 120.0])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    caplog.set_level(logging.INFO)
    Progress(total_steps=50, first_step=10, stream=io.StringIO()).update(20, {})
    assert caplog.records[0].message == "step 20/50: 0:01:00 left"


def test_a_metric_that_a_step_lacks_is_not_shown(caplog):
    caplog.set_level(logging.INFO)
    Progress(total_steps=2, stream=io.StringIO()).update(2, {"loss": 0.5})
    assert caplog.records[0].message == "step 2/2: loss 0.5, 0:00:00 left"


@pytest.mark.parametrize("total", [20, 21, 97, 1_000])
def test_a_run_of_any_length_logs_about_twenty_steps_and_six_evaluations_the_first_and_the_last_among_them(
    total, caplog
):
    caplog.set_level(logging.DEBUG)
    progress = Progress(total, stream=io.StringIO())
    for step in range(1, total + 1):
        progress.update(step, {})
        progress.evaluation(None, step, {"loss": 0.5, "rewards/auc": 0.75, "logps/chosen": -3.0})
        progress.evaluation("second", step, {"loss": 0.5})
    assert len(caplog.records) == 3 * total
    shown = [record.message for record in caplog.records if record.levelno == logging.INFO]
    steps = [message.split()[1].strip(":") for message in shown if message.startswith("step ")]
    assert 11 <= len(steps) <= 21
    assert (steps[0], steps[-1]) == (f"1/{total}", f"{total}/{total}")
    evaluations = [message for message in shown if message.startswith("evaluation at")]
    assert 5 <= len(evaluations) <= 7
    assert evaluations[0] == "evaluation at step 1: loss 0.5, auc 0.75"
    assert evaluations[-1] == f"evaluation at step {total}: loss 0.5, auc 0.75"
    assert len(shown) == len(steps) + 2 * len(evaluations)


def test_steps_that_take_long_are_logged_every_half_hour(caplog, monkeypatch):
    minutes = iter(range(0, 5000, 11))
    monkeypatch.setattr("time.monotonic", lambda: 60.0 * next(minutes))
    caplog.set_level(logging.INFO)
    progress = Progress(10_000, stream=io.StringIO())
    for step in range(1, 10):
        progress.update(step, {})
    assert [message.split("/")[0] for message in caplog.messages] == ["step 1", "step 4", "step 7"]


def test_on_a_terminal_there_is_a_bar(caplog):
    caplog.set_level(logging.INFO)
    terminal = Terminal()
    progress = Progress(total_steps=4, stream=terminal)
    progress.update(2, METRICS)
    progress.update(4, METRICS)
    progress.close()
    assert "4/4" in terminal.getvalue()
    assert "loss=0.4877, margin=0.0123" in terminal.getvalue()
    assert not caplog.records
