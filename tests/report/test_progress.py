"""The progress display: lines in a log, a bar on a terminal."""

import io
import logging
import re

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
