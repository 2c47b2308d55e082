"""What there is to say of the rows of a pass: each kind with its count, its first rows, and all of them in a file."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from openkto.data.contradictions import labelled_both_ways
from openkto.data.notes import INFORMATION, MERGED, SPECIAL_MARKUP, TEMPLATE_DIFFERS, WARNINGS
from openkto.inspection import label_errors, near_duplicates
from openkto.inspection.column import first_of_equal, numbered
from openkto.inspection.seen import BIT, FIRST_ROWS, SeenRows

BAD = "bad row: "
SAME_COMPLETION_SHARE, SAME_COMPLETION_ROWS = 0.05, 10  # an answer to this many different prompts is worth a look


@dataclass(frozen=True)
class Finding:
    """Rows of a kind. What is no warning is good to know, and not in the file of all rows."""

    kind: str
    is_warning: bool
    text: str
    count: int
    first: list[str]  # what is shown of the first rows, each with its place

    @property
    def is_bad(self) -> bool:
        """Whether these rows stop a run."""
        return self.kind.startswith(BAD)


@dataclass(frozen=True)
class Groups:
    """A number for each row, the same for rows with the same text."""

    text: NDArray[np.int32]  # prompt and completion
    prompt: NDArray[np.int32]
    completion: NDArray[np.int32]


class Gathering:
    """Collects findings, and writes the rows of warnings into the file as they come."""

    def __init__(self, seen: SeenRows) -> None:
        self._seen = seen
        self.place = seen.places()
        self.findings: list[Finding] = []

    def add(
        self,
        kind: str,
        text: str,
        rows: NDArray[np.int64],
        said: Callable[[int], str] | None = None,
        *,
        is_warning: bool = True,
    ) -> None:
        """Add rows of a kind, if there are any; `said` is what to say of each besides its place."""
        first = []
        for number, row in enumerate(map(int, rows)):
            if number == FIRST_ROWS and not is_warning:
                break
            place, of_row = self.place(row), said(row) if said is not None else ""
            if number < FIRST_ROWS:
                first.append(f"{place}: {of_row}" if of_row else place)
            if is_warning:
                self._seen.list_row(kind, place, of_row or text)
        if len(rows):
            self.findings.append(Finding(kind, is_warning, text, len(rows), first))


def gather(seen: SeenRows, max_len: int, is_left_out: NDArray[np.bool_]) -> tuple[list[Finding], str]:
    """Return the findings, warnings first, and what the measure of label errors says.

    Args:
        is_left_out: whether --max_len leaves a row out.
    """
    found = Gathering(seen)
    for kind, count in seen.bad.items():
        text = "bad rows, which stop a run, or are left out with --on_bad_rows skip"
        found.findings.append(Finding(f"{BAD}{kind}", True, text, count, seen.first_bad[kind]))
    labels, groups = seen.column("label"), _groups(seen)
    _add_repeats(found, seen, groups, labels)
    _add_lengths(found, seen, max_len, is_left_out)
    _add_flags(found, seen)
    with seen.completions.read() as completions:
        suspects = label_errors.find_label_errors(completions, labels, groups.completion)
    text = f"the label is likely inverted: {label_errors.METHOD}. Read these rows"
    classes = {True: "desirable", False: "undesirable"}
    found.add(
        "label likely inverted",
        text,
        suspects.rows,
        lambda row: f"is {classes[bool(labels[row])]} among words of the other class",
    )
    return sorted(found.findings, key=lambda finding: not finding.is_warning), suspects.text


def _groups(seen: SeenRows) -> Groups:
    prompt, completion = seen.keys("prompt"), seen.keys("completion")
    text = numbered(prompt.astype(np.int64) * (int(completion.max(initial=0)) + 1) + completion)
    return Groups(text, prompt, completion)


def _add_repeats(found: Gathering, seen: SeenRows, groups: Groups, labels: NDArray[np.bool_]) -> None:
    found.add(
        "labelled both ways",
        "the same answer to the same prompt is labelled both ways: such rows pull against each other",
        np.flatnonzero(labelled_both_ways(groups.prompt, groups.completion, labels)[0]),
    )
    first = first_of_equal(2 * groups.text.astype(np.int64) + labels)
    found.add(
        "exact duplicate",
        "prompt, completion and label repeat an earlier row's",
        _changed(first),
        lambda row: f"repeats {found.place(int(first[row]))}",
    )
    with seen.prompts.read() as prompts, seen.completions.read() as completions:
        near = near_duplicates.near_duplicates(prompts, completions, groups.text, seen.folder)
    found.add(
        "near duplicate",
        f"nearly an earlier row: {near_duplicates.METHOD}",
        np.flatnonzero(near != near_duplicates.NONE),
        lambda row: f"is nearly {_other(found.place(row), found.place(int(near[row])))}",
    )
    needed = max(SAME_COMPLETION_ROWS, SAME_COMPLETION_SHARE * len(labels))
    first_of_text = np.ones(len(labels), dtype=bool)
    first_of_text[_changed(first_of_equal(groups.text))] = False
    often = np.bincount(groups.completion[first_of_text]) >= needed  # each text is another prompt's
    found.add(
        "same completion",
        f"the completion answers {needed:.0f} different prompts or more: the model may learn to always say it",
        np.flatnonzero(often[groups.completion]),
    )
    shared = np.bincount(groups.prompt) > 1
    found.add(
        "shared prompt",
        f"the prompt is another row's too; different prompts: {shared.sum()}",
        np.flatnonzero(shared[groups.prompt]),
        is_warning=False,
    )


def _other(place: str, of_near: str) -> str:
    return "the pair's other answer" if place == of_near else of_near


def _changed(first: NDArray[np.int32]) -> NDArray[np.int64]:
    """Return the rows that are not the first of their kind."""
    return np.flatnonzero(first != np.arange(len(first), dtype=np.int32))


def _add_lengths(found: Gathering, seen: SeenRows, max_len: int, is_left_out: NDArray[np.bool_]) -> None:
    lengths = seen.column("prompt_length") + seen.column("completion_length")
    for kind, rows in (
        ("left out", np.flatnonzero(is_left_out)),
        ("cut", np.flatnonzero((lengths > max_len) & ~is_left_out)),
    ):
        found.add(
            f"{kind} at max_len",
            f"the row is too long for --max_len {max_len} and is {kind}",
            rows,
            lambda row: f"has {lengths[row]} tokens",
        )


def _add_flags(found: Gathering, seen: SeenRows) -> None:
    warnings = {
        **WARNINGS,
        "unknown tokens": "the tokenizer has no token for a part of the text: the model cannot read it",
        "special markup": SPECIAL_MARKUP,
    }
    notes = {
        **INFORMATION,
        "boundary merged": MERGED,
        "template differs": TEMPLATE_DIFFERS,
        "no template": "prompt and completion are plain texts, and no chat template is applied",
        "begins with BOS": "the prompt begins with the tokenizer's BOS",
        "ends with EOS": "the completion ends with the tokenizer's EOS; others end with their template's end of turn",
    }
    flags = seen.column("flags")
    for kind, text in (warnings | notes).items():
        found.add(kind, text, np.flatnonzero(flags & BIT[kind]), is_warning=kind in warnings)
