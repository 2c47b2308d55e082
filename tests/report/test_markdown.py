"""Texts in a Markdown table stand as they are."""

from openkto.report.markdown import markdown_table


def test_no_text_ends_a_cell_or_a_line_or_becomes_a_tag():
    assert markdown_table(["a|b", "c"], [["<x> & y", "1\r\n2\n3"]]).splitlines() == [
        "| a&#124;b | c |",
        "| --- | --- |",
        "| &lt;x> &amp; y | 1<br>2<br>3 |",
    ]
