"""What there is to say of the rows of a pass: each kind with its count, its first rows, and all of them in a file."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from openkto.data.contradictions import texts_labelled_both_ways
from openkto.data.notes import INFORMATION, MERGED, SPECIAL_MARKUP, TEMPLATE_DIFFERS, WARNINGS
from openkto.inspection import label_errors, near_duplicates
from openkto.inspection.seen import FIRST_ROWS, SeenRows

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
    """Numbers for rows with the same text, and how often texts stand there."""

    text: NDArray[np.int64]  # prompt and completion
    prompt: NDArray[np.int64]
    completion: NDArray[np.int64]


class Gathering:
    """Collects findings, and writes the rows of warnings into the file as they come."""

    def __init__(self, seen: SeenRows) -> None:
        self._seen = seen
        self.findings: list[Finding] = []

    def add(
        self, kind: str, text: str, rows: Iterable[int], said: dict[int, str] | None = None, *, is_warning: bool = True
    ) -> None:
        """Add rows of a kind, if there are any; `said` is what to say of each besides its place."""
        count, first = 0, []
        for row in rows:
            place, of_row = self._seen.place(row), (said or {}).get(row, "")
            count += 1
            if count <= FIRST_ROWS:
                first.append(f"{place}: {of_row}" if of_row else place)
            if is_warning:
                self._seen.list_row(kind, place, of_row or text)
        if count:
            self.findings.append(Finding(kind, is_warning, text, count, first))


def gather(seen: SeenRows, max_len: int, is_left_out: NDArray[np.bool_]) -> tuple[list[Finding], str]:
    """Return the findings, warnings first, and what the measure of label errors says.

    Args:
        is_left_out: whether --max_len leaves a row out.
    """
    found = Gathering(seen)
    for kind, count in seen.bad.items():
        text = "bad rows, which stop a run, or are left out with --on_bad_rows skip"
        found.findings.append(Finding(f"{BAD}{kind}", True, text, count, seen.first_bad[kind]))
    groups = _groups(seen)
    _add_repeats(found, seen, groups)
    _add_lengths(found, seen, max_len, is_left_out)
    _add_flags(found, seen)
    labels = seen.column("label")
    suspects = label_errors.find_label_errors(seen.completions.close(), labels, groups.completion)
    said = {
        row: f"is {'desirable' if labels[row] else 'undesirable'} among words of the other class"
        for row in suspects.rows.tolist()
    }
    text = f"the label is likely inverted: {label_errors.METHOD}. Read these rows"
    found.add("label likely inverted", text, suspects.rows.tolist(), said)
    return sorted(found.findings, key=lambda finding: not finding.is_warning), suspects.text


def _groups(seen: SeenRows) -> Groups:
    numbers = [np.unique(seen.column(f"{part}_key"), return_inverse=True)[1] for part in ("prompt", "completion")]
    prompt, completion = (number.astype(np.int64) for number in numbers)
    text = np.unique(prompt * (completion.max(initial=0) + 1) + completion, return_inverse=True)[1]
    return Groups(text.astype(np.int64), prompt, completion)


def _add_repeats(found: Gathering, seen: SeenRows, groups: Groups) -> None:
    labels = seen.column("label")
    text, _, is_both = texts_labelled_both_ways(groups.prompt, groups.completion, labels)
    found.add(
        "labelled both ways",
        "the same answer to the same prompt is labelled both ways: such rows pull against each other",
        np.flatnonzero(is_both[text]).tolist(),
    )
    _, first, same = np.unique(groups.text * 2 + labels, return_index=True, return_inverse=True)
    repeats = np.flatnonzero(first[same] != np.arange(len(same))).tolist()
    said = {row: f"repeats {seen.place(int(first[same[row]]))}" for row in repeats}
    found.add("exact duplicate", "prompt, completion and label repeat an earlier row's", repeats, said)
    near = near_duplicates.near_duplicates(seen.prompts.close(), seen.completions.close(), groups.text)
    said = {row: f"is nearly {seen.place(other)}" for row, other in near.items()}
    found.add("near duplicate", f"nearly an earlier row: {near_duplicates.METHOD}", sorted(near), said)
    prompts_of = np.unique(np.stack([groups.completion, groups.prompt]), axis=1)[0]
    needed = max(SAME_COMPLETION_ROWS, SAME_COMPLETION_SHARE * len(labels))
    often = np.bincount(prompts_of) >= needed
    found.add(
        "same completion",
        f"the completion answers {needed:.0f} different prompts or more: the model may learn to always say it",
        np.flatnonzero(often[groups.completion]).tolist(),
    )
    shared = np.flatnonzero(np.bincount(groups.prompt)[groups.prompt] > 1)
    said_of_all = f"the prompt is another row's too; different prompts: {len(np.unique(groups.prompt[shared]))}"
    found.add("shared prompt", said_of_all, shared.tolist(), is_warning=False)


def _add_lengths(found: Gathering, seen: SeenRows, max_len: int, is_left_out: NDArray[np.bool_]) -> None:
    lengths = seen.column("prompt_length") + seen.column("completion_length")
    for kind, rows in (
        ("left out", np.flatnonzero(is_left_out)),
        ("cut", np.flatnonzero((lengths > max_len) & ~is_left_out)),
    ):
        said = {row: f"has {lengths[row]} tokens" for row in rows.tolist()}
        found.add(
            f"{kind} at max_len", f"the row is too long for --max_len {max_len} and is {kind}", rows.tolist(), said
        )


def _add_flags(found: Gathering, seen: SeenRows) -> None:
    warnings = {
        **WARNINGS,
        "unknown tokens": "the tokenizer has no token for a part of the text: the model cannot read it",
        "special markup": SPECIAL_MARKUP,
        "looks like a chat": "the prompt looks like a chat, and no chat template is applied: give messages, or pass "
        "--apply_chat_template for prompts of one turn",
        "foreign markup": "the prompt holds the markup of a chat template that is not this tokenizer's, which it reads "
        "as plain text",
    }
    notes = {
        **INFORMATION,
        "boundary merged": MERGED,
        "template differs": TEMPLATE_DIFFERS,
        "no template": "prompt and completion are plain texts, and no chat template is applied",
        "begins with BOS": "the prompt begins with the tokenizer's BOS",
        "ends with EOS": "the completion ends with the tokenizer's EOS; others end with their template's end of turn",
    }
    for kind, text in warnings.items():
        found.add(kind, text, seen.rows_of(kind).tolist())
    for kind, text in notes.items():
        found.add(kind, text, seen.rows_of(kind).tolist(), is_warning=False)
