"""Makes a report: one HTML file that holds its data, its plots' script and its style, without external links."""

import functools
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import jinja2
import vl_convert

from openkto.pages.charts import Chart
from openkto.pages.reading import Finding, ends, judged, read_curves
from openkto.pages.run_files import Line, RunRecord, with_distinct_names
from openkto.pages.samples import samples_of
from openkto.pages.suspects import Suspect

PNG_WIDTH, PNG_SCALE = 640, 2.0


@dataclass(frozen=True)
class SuspectRow:
    """A suspect as the page shows it."""

    suspect: Suspect
    place: str
    prompt: str
    completion: str


@dataclass(frozen=True)
class Suspects:
    """The rows that are most likely mislabelled, and how they were found."""

    rows: list[SuspectRow]
    note: str


@dataclass(frozen=True)
class RunView:
    """What the page says of one run."""

    name: str
    tiles: list[tuple[str, str]]
    findings: list[Finding]
    problems: list[str]
    starts: list[Line]


@dataclass(frozen=True)
class SettingView:
    name: str
    values: list[str]
    differs: bool


def report_page(runs: list[RunRecord], charts: list[Chart], suspects: Suspects | None) -> str:
    """Return the page of one run, or of several next to each other."""
    names = with_distinct_names(runs)
    views = [
        RunView(name, _tiles(run), read_curves(run), run.problems, run.starts)
        for run, name in zip(runs, names, strict=True)
    ]
    return rendered(
        "page.html.jinja",
        charts,
        title=f"OpenKTO: {', '.join(names)}",
        subtitle=_subtitle(runs),
        runs=views,
        samples=samples_of(runs, names),
        suspects=suspects,
        settings=_settings(runs),
    )


def rendered(name: str, charts: list[Chart], **values: Any) -> str:
    """Return a page of a template in this folder, with its charts, their script and their data in it."""
    here = files("openkto.pages")
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda part: (here / part).read_text(encoding="utf-8")),
        autoescape=True,
        trim_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template(name).render(
        charts=charts,
        specs={chart.key: chart.spec for chart in charts},
        script=_plot_script() if charts else "",
        **values,
    )


@functools.cache
def _plot_script() -> str:
    """Return the plots' script with the libraries that it imports: seconds of work, and the same for every page."""
    script = vl_convert.javascript_bundle((files("openkto.pages") / "page.js").read_text(encoding="utf-8"))
    # What would end the script's element may stand in the libraries' own texts.
    return str(script).replace("</script", "<\\/script")


def png_of(chart: Chart) -> bytes:
    """Return a chart as a PNG picture."""
    spec = {**chart.spec, "title": chart.title, "background": "white"}
    if spec.get("width") == "container":
        spec["width"] = PNG_WIDTH
    return bytes(vl_convert.vegalite_to_png(spec, scale=PNG_SCALE))


def _subtitle(runs: list[RunRecord]) -> str:
    if len(runs) > 1:
        return f"{len(runs)} runs beside each other."
    settings = runs[0].settings
    parts = [f"{settings[name]}" for name in ("pretrain",) if name in settings]
    rows = settings.get("dataset")
    parts += [", ".join(map(str, rows))] if isinstance(rows, list) else []
    return "KTO of " + " on ".join(parts) if parts else ""


def _tiles(run: RunRecord) -> list[tuple[str, str]]:
    """Return the figures that one looks for first."""
    if not run.train:
        return []
    last = run.train[-1]
    total = run.total_steps
    tiles = [("steps", f"{last['step']}" + (f" of {total}" if total else "") + (", finished" if run.is_done else ""))]
    if "epoch" in last:
        tiles.append(("epochs", f"{last['epoch']:.3g}"))
    where, lines = judged(run)
    for metric, label in (("rewards/auc", "AUC"), ("rewards/margins", "reward margin")):
        found = ends(lines, metric)
        if found is not None:
            tiles.append((f"{label}, {where}", f"{found[0]:.3g} → {found[1]:.3g}"))
        elif where != "training rows" and metric in lines[-1]:
            tiles.append((f"{label}, {where}", f"{lines[-1][metric]:.3g}"))
    found = ends(run.train, "loss")
    if found is not None:
        tiles.append(("loss, training", f"{found[0]:.3g} → {found[1]:.3g}"))
    if "tokens_per_second" in last:
        tiles.append(("tokens a second", f"{last['tokens_per_second']:,.0f}"))
    if "peak_memory_gb" in last:
        tiles.append(("peak memory", f"{last['peak_memory_gb']:.3g} GiB"))
    if run.summary is not None and "seconds" in run.summary:
        tiles.append(("time", _duration(float(run.summary["seconds"]))))
    return tiles


def _duration(seconds: float) -> str:
    minutes, hours = int(seconds // 60) % 60, int(seconds // 3600)
    return (
        f"{hours} h {minutes} min"
        if hours
        else f"{minutes} min {seconds % 60:.0f} s"
        if minutes
        else f"{seconds:.0f} s"
    )


def _settings(runs: list[RunRecord]) -> list[SettingView]:
    names = list(dict.fromkeys(name for run in runs for name in run.settings))
    views = []
    for name in names:
        values = [_text(run.settings.get(name)) for run in runs]
        views.append(SettingView(name, values, differs=len(set(values)) > 1))
    return sorted(views, key=lambda view: not view.differs)


def _text(value: Any) -> str:
    if value is None:
        return "–"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
