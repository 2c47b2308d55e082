"""Tables in Markdown whose cells hold any text."""

from collections.abc import Iterable, Sequence


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in which texts stand as they are: none of them ends a cell or a line, or becomes a tag."""
    lines = [list(map(_cell, head)), ["---"] * len(head), *(list(map(_cell, row)) for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _cell(text: str) -> str:
    for mark, entity in (("&", "&amp;"), ("<", "&lt;"), ("|", "&#124;"), ("\r\n", "<br>"), ("\n", "<br>")):
        text = text.replace(mark, entity)
    return text
