"""`openkto report RUN [RUN ...]`, `cli/report.py`: a run's curves, rows and settings as one HTML page."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from openkto.config.flags import DESCRIPTIONS, parse
from openkto.config.plain_parser import PlainParser
from openkto.errors import ConfigError, OpenKTOError
from openkto.pages.run_files import RunRecord, read_run, with_distinct_names
from openkto.pages.suspects import suspects_of

if TYPE_CHECKING:
    from openkto.data.row_texts import RowText
    from openkto.pages.page import Suspects

log = logging.getLogger(__name__)

SHOWN_SUSPECTS = 50
LONGEST_TEXT = 600  # characters shown of a prompt and of a completion
HOW_FOUND = (
    "Rows whose reward stays on the other label's side of the reference point in the later half of training, the "
    "strangest of their class first. Read them: a wrong label is one reason, a hard or an unusual row another."
)


def main(argv: list[str]) -> None:
    """Write the page as the command line says.

    Raises:
        OpenKTOError: something that the user can act on.
    """
    options = parser().parse_args(argv)
    if options.suspects < 0:
        raise ConfigError(f"--suspects: must be 0 or more; got {options.suspects}. Correct it, or leave it out.")
    runs = [read_run(Path(name)) for name in options.runs]
    # The plots' library takes a moment to load: a wrong folder is answered before.
    from openkto.pages.charts import charts_of
    from openkto.pages.page import png_of, report_page

    charts = charts_of(runs, with_distinct_names(runs))
    output = Path(options.output or runs[0].folder / "report.html")
    write(output, report_page(runs, charts, find_suspects(runs, options.suspects)).encode())
    log.info("the report is in %s", output)
    if options.png:
        folder = output.with_suffix("")
        for chart in charts:
            write(folder / f"{chart.key}.png", png_of(chart))
        log.info("%d pictures are in %s", len(charts), folder)


def find_suspects(runs: list[RunRecord], at_most: int) -> "Suspects | None":
    """Return the rows of a run that are most likely mislabelled, with their texts where its data can still be read."""
    from openkto.pages.page import SuspectRow, Suspects

    if len(runs) != 1 or runs[0].rewards is None or at_most == 0:
        return None
    found = suspects_of(runs[0].rewards, at_most)
    if not found:
        return None
    try:
        texts = texts_of(runs[0], [one.row for one in found])
        note = HOW_FOUND
    except (OpenKTOError, TypeError) as error:
        texts, note = {}, f"{HOW_FOUND} Their texts cannot be shown: {error}"
    rows = []
    for one in found:
        text = texts.get(one.row)
        shown = (
            (text.place, _cut(text.prompt), _cut(text.completion)) if text is not None else (f"row {one.row}", "", "")
        )
        rows.append(SuspectRow(one, *shown))
    return Suspects(rows, note)


def texts_of(run: RunRecord, numbers: list[int]) -> "dict[int, RowText]":
    """Return a run's training rows by their numbers.

    Raises:
        OpenKTOError: the settings or the data cannot be read.
    """
    from openkto.commands.rows import row_settings
    from openkto.data.row_texts import row_texts
    from openkto.data.sources import find_sources

    config = parse(["--config", str(run.folder / "run.yaml")], "train")[0]
    data = config.data
    place = data.dataset_split, data.dataset_config, data.dataset_revision, data.data_cache_dir
    sources = find_sources(data.dataset, *place)
    return row_texts(sources, row_settings(data), numbers, max_samples=data.max_samples)


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]} ..."


def parser() -> PlainParser:
    made = PlainParser(prog="openkto report", description=DESCRIPTIONS["report"])
    made.add_argument("runs", nargs="+", metavar="RUN", help="the --save_path of a run")
    made.add_argument("--output", metavar="PATH", help="the page (default: report.html in the first run's folder)")
    made.add_argument(
        "--png", action="store_true", help="also write each plot as a PNG file, in a folder next to the page"
    )
    made.add_argument(
        "--suspects",
        type=int,
        default=SHOWN_SUSPECTS,
        metavar="N",
        help="show N rows that are most likely mislabelled (default: %(default)s)",
    )
    made.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return made


def write(path: Path, content: bytes) -> None:
    """Write a file, and the folders above it.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as error:
        raise ConfigError(f"--output {path}: cannot be written ({error.strerror}). Name another file.") from error
