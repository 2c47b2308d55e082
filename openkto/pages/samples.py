"""The answers of samples.jsonl side by side: those before training and the newest, of one run or several."""

from collections.abc import Sequence
from dataclasses import dataclass

from openkto.pages.run_files import Line, RunRecord

SHOWN_PROMPTS = 50
SHOWN_STEPS = 10
LONGEST_ANSWER = 2000  # characters shown


@dataclass(frozen=True)
class Answered:
    """The answers of one run at one step."""

    run: str
    step: int
    greedy: str
    sampled: str


@dataclass(frozen=True)
class Question:
    """A prompt with its row's completion, where it is one of a row, and the runs' answers."""

    source: str
    prompt: str
    completion: str | None
    label: bool | None
    ends: list[Answered]  # each run's first and newest
    between: list[Answered]  # some of those of the steps between them


@dataclass(frozen=True)
class Samples:
    """The questions that the page shows, and how many there are."""

    questions: list[Question]
    count: int


def samples_of(runs: Sequence[RunRecord], names: Sequence[str]) -> Samples | None:
    """Return the answers of the runs by prompt, in the order of the first run that has it; None where there are none.

    Runs may have answered different prompts: a question shows the runs that did answer it.
    """
    found: dict[str, list[tuple[str, list[Line]]]] = {}
    for run, name in zip(runs, names, strict=True):
        by_prompt: dict[str, list[Line]] = {}
        for line in run.samples:
            by_prompt.setdefault(str(line["prompt"]), []).append(line)
        for prompt, lines in by_prompt.items():
            found.setdefault(prompt, []).append((name, lines))
    if not found:
        return None
    shown = list(found.items())[:SHOWN_PROMPTS]
    return Samples([_question(prompt, answered) for prompt, answered in shown], len(found))


def _question(prompt: str, answered: list[tuple[str, list[Line]]]) -> Question:
    first = answered[0][1][0]
    ends, between = [], []
    for name, lines in answered:
        ends += [_answered(name, line) for line in ([lines[0], lines[-1]] if len(lines) > 1 else lines)]
        inner = lines[1:-1]
        stride = max(1, -(-len(inner) // SHOWN_STEPS))
        between += [_answered(name, line) for line in inner[stride - 1 :: stride]]
    label = first.get("label")
    completion = None if label is None else _cut(str(first.get("completion", "")))
    return Question(str(first.get("source", "")), _cut(prompt), completion, label, ends, between)


def _answered(run: str, line: Line) -> Answered:
    return Answered(run, line["step"], _answer(line, "greedy"), _answer(line, "sampled"))


def _answer(line: Line, kind: str) -> str:
    """Return an answer; an ellipsis says that it had not ended where it was cut."""
    return _cut(str(line[kind])) + ("" if line.get(f"{kind}_finished", True) else " …")


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_ANSWER else f"{text[:LONGEST_ANSWER]} …"
