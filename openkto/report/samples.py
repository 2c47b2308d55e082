"""How a run's sampled answers are shown: in its log, and as a table in its trackers."""

from collections.abc import Sequence
from typing import Any

from openkto.report.markdown import markdown_table

Line = dict[str, Any]

LOGGED = 2
LOGGED_CHARACTERS = 100
COLUMNS = ("step", "source", "prompt", "greedy", "sampled", "completion", "label")


def for_log(step: int, lines: Sequence[Line]) -> list[str]:
    """Return a short text for each of the first answers."""
    return [
        f"sample at step {step}: {_end(line['prompt'])} answered by {_start(line['greedy'])}, "
        f"sampled {_start(line['sampled'])}"
        for line in lines[:LOGGED]
    ]


def _start(text: str) -> str:
    return repr(text if len(text) <= LOGGED_CHARACTERS else f"{text[:LOGGED_CHARACTERS]}...")


def _end(text: str) -> str:
    """Return the end of a prompt, which is where its question is."""
    return repr(text if len(text) <= LOGGED_CHARACTERS else f"...{text[-LOGGED_CHARACTERS:]}")


def as_rows(lines: Sequence[Line]) -> list[list[Any]]:
    """Return the lines as rows of `COLUMNS`; None for what a line has not."""
    return [[line.get(name) for name in COLUMNS] for line in lines]


def as_markdown(lines: Sequence[Line]) -> str:
    """Return a Markdown table, in which texts stand as they are."""
    return markdown_table(COLUMNS, [["" if cell is None else str(cell) for cell in row] for row in as_rows(lines)])
