"""The page of an inspection: what there is to look at in the rows, their lengths, and some as the model sees them."""

from typing import Any

from openkto.inspection.result import Inspection
from openkto.pages.charts import CLASS_COLOURS, SCHEMA, Chart
from openkto.pages.page import rendered


def inspection_page(found: Inspection, samples: str, listed: str) -> str:
    """Return the page.

    Args:
        samples: rows as the model sees them.
        listed: the file that names all rows of the warnings.
    """
    warnings = sum(finding.is_warning for finding in found.findings)
    tiles = [
        ("rows read", f"{found.rows_read:,}"),
        ("rows to train on", f"{found.rows_kept:,}"),
        *((name, f"{count:,}") for name, count in found.classes.items()),
        *((f"weight of {name} rows", f"{weight:.4g}") for name, weight in found.weights.items()),
        ("warnings", str(warnings)),
    ]
    rows = dict.fromkeys(what for of_class in found.lengths.values() for what in of_class)
    return rendered(
        "inspection.html.jinja",
        length_charts(found.histograms),
        title="OpenKTO: the rows before the run",
        subtitle=found.name,
        tiles=tiles,
        findings=found.findings,
        listed=listed,
        label_measure=found.label_measure,
        balance=found.balance_warning or found.balance,
        formula=found.formula,
        held_out=found.held_out,
        lengths=found.lengths,
        lengths_rows=list(rows),
        samples=samples,
        recognised=found.recognised,
    )


def length_charts(bars: list[dict[str, Any]]) -> list[Chart]:
    """Return a histogram of the prompts' lengths and one of the completions', with a colour for each class."""
    charts = []
    for part in ("prompt", "completion"):
        spec = {
            "$schema": SCHEMA,
            "width": "container",
            "height": 200,
            "data": {"values": [bar for bar in bars if bar["part"] == part]},
            "mark": {"type": "bar", "opacity": 0.6, "binSpacing": 0},
            "encoding": {
                "x": {"field": "from", "type": "quantitative", "bin": {"binned": True}, "title": "tokens"},
                "x2": {"field": "to"},
                "y": {"field": "rows", "type": "quantitative", "stack": None},
                "color": CLASS_COLOURS,
            },
        }
        note = "Before any cut. Rows beyond the longest 0.5% stand in the last bars."
        charts.append(Chart(f"{part}_lengths", f"Length of {part}s", note, spec))
    return charts
