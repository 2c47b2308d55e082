"""The progress display: lines in a log, a bar on a terminal."""

import io
import logging
import re

import pytest

from openkto.trainer.progress import Progress

METRICS = {"loss": 0.48768, "rewards/margins": 0.0123, "samples_per_second": 12.34, "kl": 1.0}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_without_a_terminal_a_step_is_a_log_line(caplog):
    caplog.set_level(logging.INFO)
    progress = Progress(total_steps=300, stream=io.StringIO())
    progress.update(12, METRICS)
    progress.close()
    (record,) = caplog.records
    pattern = r"step 12/300: loss 0\.4877, margin 0\.0123, samples/s 12\.34, \d+:\d\d:\d\d left"
    assert re.fullmatch(pattern, record.message)


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


def steps_said(caplog, monkeypatch, total: int, seconds_a_step: float, until: int | None = None) -> list[int]:
    """Return which steps of a run have a line."""
    clock = iter(seconds_a_step * i for i in range(total + 1))
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    caplog.set_level(logging.INFO)
    progress = Progress(total, stream=io.StringIO())
    for step in range(1, (until or total) + 1):
        progress.update(step, METRICS)
    progress.close()
    return [int(re.findall(r"step (\d+)/", message)[0]) for message in caplog.messages]


@pytest.mark.parametrize(
    ("total", "seconds_a_step", "said"),
    [
        (12, 10.0, list(range(1, 13))),  # a short run of slow steps: all
        (1000, 1.0, [*range(1, 1000, 10), 1000]),  # a hundredth of the steps
        (1000, 0.01, [1, 501, 1000]),  # 5 seconds
        (100_000, 300.0, [*range(1, 100_000, 2), 100_000]),  # 10 minutes, where a hundredth is days
    ],
)
def test_a_line_comes_with_a_hundredth_of_the_steps_and_at_most_every_5_seconds(
    caplog, monkeypatch, total, seconds_a_step, said
):
    assert steps_said(caplog, monkeypatch, total, seconds_a_step) == said


def test_the_last_step_of_a_run_that_stops_early_has_its_line(caplog, monkeypatch):
    assert steps_said(caplog, monkeypatch, 1000, 1.0, until=15) == [1, 11, 15]


def test_on_a_terminal_log_lines_are_above_the_bar_and_the_handlers_are_as_before_when_it_is_closed():
    terminal, file = Terminal(), io.StringIO()
    handlers = [logging.StreamHandler(terminal), logging.StreamHandler(file)]
    for handler in handlers:
        logging.root.addHandler(handler)
    try:
        progress = Progress(total_steps=4, stream=terminal)
        progress.update(2, METRICS)
        logging.getLogger("openkto").warning("checkpoint global_step2: saved")
        progress.close()
        assert [handler.stream for handler in handlers] == [terminal, file]
    finally:
        for handler in handlers:
            logging.root.removeHandler(handler)
    before = terminal.getvalue().partition("checkpoint global_step2: saved\n")[0]
    assert before.endswith("\r"), "the bar was not taken away before the line"
    assert "2/4" in terminal.getvalue().rpartition("saved\n")[2], "the bar is not drawn again"
    assert file.getvalue() == "checkpoint global_step2: saved\n"


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
