"""Counts of what happened to the rows, and their log lines."""

import logging
from dataclasses import dataclass

from openkto.data.notes import INFORMATION, MERGED, SPECIAL_MARKUP, TEMPLATE_DIFFERS, WARNINGS

logger = logging.getLogger(__name__)

# Fields that are likely a part of what the answer answered.
CONTEXT = ("history", "chat_history", "conversation_history", "system_prompt", "system_message", "context")


@dataclass(frozen=True)
class DataReport:
    """What became of the rows; JSON-able through `dataclasses.asdict`.

    Kept and cut rows are counted as an epoch sees them, mixing included; skipped records (a pair is one) by kind.
    """

    rows_read: int
    kept: int
    desirable: int
    undesirable: int
    cut_desirable: int
    cut_undesirable: int
    left_out_desirable: int
    left_out_undesirable: int
    skipped: dict[str, int]
    first_skipped: dict[str, str]
    merged: int
    template_differs: int
    special_markup: int
    notes: dict[str, int]  # kept rows before mixing, by what was special about them (openkto/data/notes.py)
    unlabelled: dict[str, int]
    findings: list[str]
    unread: list[str]  # the fields with values that nothing reads
    contradicting: list[int]  # texts labelled both ways, their rows, the numbers of the first two; else nothing


def some_rows(count: int) -> str:
    """Say how many rows there are."""
    return f"{count} row{'' if count == 1 else 's'}"


def bad_rows(count: int, kind: str) -> str:
    """Say how many bad rows of a kind there are."""
    return f"{count} bad row{'s' if count > 1 else ''} ({kind})"


def say(report: DataReport, max_len: int, *, with_source: bool = True) -> None:
    """Log every count that is not 0, and the skipped rows as a warning.

    Args:
        with_source: also log what is known of all rows of the source, of which these may be a part.
    """
    logger.info("data: %s: %d desirable, %d undesirable", some_rows(report.kept), report.desirable, report.undesirable)
    by_class = "%s: %d desirable, %d undesirable rows"
    if report.cut_desirable or report.cut_undesirable:
        cut = f"cut at max_len {max_len}"
        logger.info(f"data: {by_class}", cut, report.cut_desirable, report.cut_undesirable)
    if report.left_out_desirable or report.left_out_undesirable:
        left_out, cure = f"left out, too long for max_len {max_len}", "; raise --max_len, or change --truncation"
        logger.warning(
            f"warning: data: {by_class}{cure}", left_out, report.left_out_desirable, report.left_out_undesirable
        )
    if with_source:
        _say_source(report)


def _say_source(report: DataReport) -> None:
    for line in report.findings:
        logger.info("data: %s", line)
    for reason, count in report.unlabelled.items():
        logger.info("data: left out %s %s", some_rows(count), reason)
    if report.contradicting:
        texts, rows, first, second = report.contradicting
        are = "text is" if texts == 1 else "texts are"
        logger.warning(
            "warning: data: %d %s labelled both ways, in %d rows, which contradict each other. "
            "The first are rows %d and %d.", texts, are, rows, first, second,
        )  # fmt: skip
    for kind, count in report.skipped.items():
        logger.warning("warning: data: skipped %s. The first: %s", bad_rows(count, kind), report.first_skipped[kind])
    notes = {
        MERGED: report.merged,
        TEMPLATE_DIFFERS: report.template_differs,
        SPECIAL_MARKUP: report.special_markup,
    }
    for what, count in notes.items():
        if count:
            logger.info("data: %s: %s", some_rows(count), what)
    for kind, count in report.notes.items():
        if kind in WARNINGS:
            logger.warning("warning: data: %s: %s", some_rows(count), WARNINGS[kind])
        else:
            logger.info("data: %s: %s", some_rows(count), INFORMATION[kind])
    context = [name for name in report.unread if name.lower() in CONTEXT]
    if context:
        logger.warning(
            "warning: data: %s: not read, so the model sees the prompts without it; put it into messages.",
            ", ".join(context),
        )
    if report.unread:
        more = ", ..." if len(report.unread) > 12 else ""
        logger.info("data: fields that are not read: %s%s", ", ".join(report.unread[:12]), more)
