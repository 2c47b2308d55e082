"""Find the sources of a data set and tokenise their rows into a file, or find the file of an earlier time."""

import datetime
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import datasets

from openkto.config.data_checks import check_template
from openkto.data.cache import ROWS_FILE, cache_folder, cache_key, cached_folder
from openkto.data.prepare import Preparation, Prepared, RowWatch, load_prepared
from openkto.data.row import RowSettings
from openkto.data.sources import Source, SourceSettings, find_sources
from openkto.data.template import uses_date


@dataclass(frozen=True)
class PreparedRows:
    """Tokenised rows in a file, all of them: none is chosen, cut or mixed yet."""

    name: str
    sources: list[Source]
    counts: Prepared
    file: Path

    def rows(self, places: list[int]) -> list[dict[str, Any]]:
        """Return a few rows by their places in the file."""
        stored = datasets.Dataset.from_file(str(self.file))
        return [stored[place] for place in places]


def prepare_rows(
    source: str | Path | Sequence[Any],
    tokenizer: Any,
    settings: RowSettings,
    place: SourceSettings,
    *,
    on_bad_rows: Literal["error", "skip"] = "error",
    end_token_ids: Sequence[int] = (),
    cache_dir: str | Path | None = None,
    watch: RowWatch | None = None,
) -> PreparedRows:
    """Return the rows of a source; see `UnpairedPreferenceDataset`.

    Args:
        watch: is shown each row as it is read; cached rows are then read again.

    Raises:
        DataError: something is wrong with the data.
        ConfigError: settings contradict each other.
    """
    date = settings.template_date or datetime.date.today().isoformat()
    settings = replace(settings, template_date=date if uses_date(tokenizer) else None)
    check_template("input_template", settings.input_template, settings.apply_chat_template)
    sources = find_sources(source, place.split, place.subset, place.revision, cache_dir)

    def build(folder: Path) -> None:
        preparation = Preparation(
            tokenizer,
            settings,
            max_samples=place.max_samples,
            on_bad_rows=on_bad_rows,
            end_token_ids=end_token_ids,
            watch=watch,
        )
        preparation.write(sources, folder)

    key = cache_key(
        [found.digest() for found in sources],
        tokenizer,
        {
            **asdict(settings),
            "end_token_ids": list(end_token_ids),
            "max_samples": place.max_samples,
            "on_bad_rows": on_bad_rows,
            "keys": [found.settings for found in sources],
        },
    )
    folder = cached_folder(cache_folder(cache_dir), key, build, always_builds=watch is not None)
    return PreparedRows(", ".join(found.name for found in sources), sources, load_prepared(folder), folder / ROWS_FILE)
