"""Find what one item of --dataset names (file, glob, folder, hub name) and read its records with their place.

Only data is read: a dataset's own code is never run.
"""

import difflib
import glob
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import datasets

from openkto.data.arrow_files import BATCH_ROWS, read_batches
from openkto.data.cache import cache_folder
from openkto.data.entries import read_entry
from openkto.data.first_bytes import check_first_bytes
from openkto.data.holdout import RowChoice
from openkto.data.hub_folder import files_of_split
from openkto.data.json_files import Records
from openkto.data.problems import Findings, data_error, shorten
from openkto.data.readers import READERS, TEXT_CONTAINERS, read_file
from openkto.data.remote import is_address, local_copies
from openkto.data.text_files import COMPRESSIONS, DataFile
from openkto.files import blocks
from openkto.masking import name_of_address
from openkto.process.limits import kind_of_file

HUB_NAME = re.compile(r"([A-Za-z0-9][\w.-]*(?:/[\w.-]+)?)(?::([\w.-]+))?")  # owner/name, or owner/name:subset
GLOB_CHARACTERS = set("*?[")
SUFFIXES = f"{', '.join(READERS)}; text files also with {', '.join(COMPRESSIONS)} behind"


@dataclass(frozen=True)
class Part:
    """One file of a source (or what stands for one): labels keep one convention within it."""

    name: str
    file: DataFile | None = None
    folder: Path | None = None  # where save_to_disk wrote the dataset
    dataset: Any = None
    rows: Sequence[object] = ()

    def records(self, findings: Findings) -> Records:
        """Yield (place, record), and note what was recognised."""
        if self.dataset is not None:
            tables = self.dataset.with_format("arrow").iter(batch_size=BATCH_ROWS)
            return read_batches(self.name, "Arrow", tables, findings)
        if self.file is not None:
            return read_file(self.file, findings)
        return ((f"{self.name}:row {number}", row) for number, row in enumerate(self.rows))

    def content(self) -> Iterator[bytes]:
        """Yield what the records depend on, for the cache's key."""
        if self.file is not None:
            yield (self.file.container + self.file.compression).encode()
            yield from blocks(self.file.path)
        elif self.folder is not None:
            for file in sorted(self.folder.rglob("*")):
                if file.is_file():
                    yield file.suffix.lower().encode()
                    yield from blocks(file)
        elif self.dataset is not None:
            yield str(self.dataset._fingerprint).encode()
        else:
            for row in self.rows:
                yield json.dumps(row, default=repr).encode()


@dataclass(frozen=True)
class Source:
    """One item of --dataset: its parts in reading order."""

    name: str
    parts: tuple[Part, ...]
    settings: dict[str, object] = field(default_factory=dict)  # of how it is read that hold for it only

    def records(self, findings: Findings) -> Iterator[tuple[str, str, object]]:
        """Yield (file, place, record); raises DataError where there is not a single one. An empty shard is noted."""
        is_empty = True
        for part in self.parts:
            place = None
            for place, value in part.records(findings):
                yield part.name, place, value
            if place is None and len(self.parts) > 1:
                findings.add(part.name, "the file holds no rows")
            is_empty &= place is None
        if is_empty:
            raise data_error(self.name, "must hold at least one row", "none", "Give it rows, or leave it out.")

    def digest(self) -> str:
        """Return the sha256 of the content; equal for equal data wherever it lies."""
        total = hashlib.sha256()
        for part in self.parts:
            digest = hashlib.sha256()
            for block in part.content():
                digest.update(block)
            total.update(digest.digest())
        return total.hexdigest()


@dataclass(frozen=True)
class SourceSettings:
    """Which part of each source makes a data set; an entry's own split, config and revision go over it.

    Args:
        split: of a hub dataset or of a folder with several.
        subset: of a hub dataset with several; NAME:SUBSET names it, too.
        revision: the commit, tag or branch of hub datasets.
        max_samples: records read from each source, from its start.
        choice: which of the rows that were read are the data set's; None takes them all.
    """

    split: str = "train"
    subset: str | None = None
    revision: str | None = None
    max_samples: int = 1_000_000
    choice: RowChoice | None = None


def find_sources(
    source: str | Path | Sequence[object],
    split: str,
    subset: str | None = None,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
) -> list[Source]:
    """Return the sources that a path, a list of paths or a list of rows (dicts) names.

    Files that lie elsewhere are copied into `cache_dir`.

    Raises DataError where nothing is there, naming the nearest thing that is.
    """
    if isinstance(source, (str, Path)):
        source = [source]
    if not source:
        raise data_error("dataset", "must name at least one file", "none", "Pass --dataset FILE.")
    if all(isinstance(item, (str, Path)) for item in source):
        sources = []
        for entry in (read_entry(str(item)) for item in source):
            place = {"split": split, "config": subset, "revision": revision, **entry.place}
            found = find_source(entry.path, str(place["split"]), place["config"], place["revision"], cache_dir)
            sources.append(replace(found, settings=entry.settings))
        return sources
    return [Source("rows", (Part("rows", rows=source),))]


def find_source(
    item: str | Path,
    split: str,
    subset: str | None = None,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
) -> Source:
    """Return the one source that a path, glob, `save_to_disk` folder, address or hub name stands for."""
    name = str(item)
    if is_address(name):
        copies = local_copies(name, cache_folder(cache_dir) / "fetched")
        return Source(name_of_address(name), tuple(_file(copy, of) for copy, of in copies))
    name = name.removeprefix("file://")
    path = Path(name).expanduser()
    if path.is_dir():
        return Source(name, _folder(path, name, split, subset))
    if path.exists():
        return Source(name, (_file(path),))
    if GLOB_CHARACTERS & set(name):
        found = [Path(match) for match in sorted(glob.glob(str(path), recursive=True)) if Path(match).is_file()]
        if not found:
            raise data_error(name, "must match at least one file", "no match", "Correct the pattern.")
        return Source(name, tuple(_file(match) for match in found))
    hub = hub_match(name)
    if hub is None:
        raise _missing(path, name)
    return Source(name, (_hub(name, hub[1], split, hub[2] or subset, revision),))


def hub_match(name: str) -> re.Match[str] | None:
    """Return the data set and the subset that a name means on the Hub; None for what lies here or elsewhere."""
    path = Path(name).expanduser()
    is_file = path.exists() or GLOB_CHARACTERS & set(name) or DataFile(path, name).container in READERS
    return None if is_file or is_address(name) else HUB_NAME.fullmatch(name)


def _file(path: Path, name: str = "") -> Part:
    file = DataFile(path, name or str(path))
    if file.container not in READERS or (file.compression and file.container not in TEXT_CONTAINERS):
        got = shorten(file.container + file.compression)
        is_table = file.container in (".xlsx", ".xls", ".ods", ".numbers")
        cure = "Save the table as CSV UTF-8." if is_table else "Convert the file, or rename it if it is one of these."
        raise data_error(file.name, f"a data file's name must end in one of {SUFFIXES}", got, cure)
    _check_readable(path)
    check_first_bytes(file)
    return Part(file.name, file=file)


def _check_readable(path: Path) -> None:
    """See that a file can be read to its end, or that a folder is there; raises DataError."""
    try:
        kind = kind_of_file(path)
        if kind is not None:
            raise data_error(str(path), "must be a plain file, which can be read twice", kind, "Write it to a file.")
        if path.is_file():
            path.open("rb").close()
    except OSError as error:
        raise data_error(
            str(path), "must be readable", error.strerror or "an error", "Check its permissions."
        ) from None


def _missing(path: Path, name: str) -> Exception:
    if not path.parent.is_dir():
        return data_error(
            name, "must be an existing file", f"a folder that does not exist, {path.parent}", "Correct the path."
        )
    files = [entry.name for entry in path.parent.iterdir()]
    nearest = difflib.get_close_matches(path.name, files, n=1, cutoff=0.5)
    cure = f"The nearest name there is {path.parent / nearest[0]}." if nearest else "Correct the name."
    return data_error(name, "must be an existing file", "no such file", cure)


def _folder(path: Path, name: str, split: str, subset: str | None) -> tuple[Part, ...]:
    if not (path / "dataset_info.json").is_file() and not (path / "dataset_dict.json").is_file():
        found = [
            file for file in files_of_split(path, name, split, subset) if DataFile(file, file.name).container in READERS
        ]
        if not found:
            rule = "a folder must hold data files, or have been written by datasets' save_to_disk"
            raise data_error(name, rule, "neither", f"Pass a file ({SUFFIXES}).")
        return tuple(_file(file) for file in found)
    for file in sorted(path.rglob("*")):
        _check_readable(file)
    # The library raises whatever its parts raise (JSON, Arrow, missing files), so the list of types is open.
    try:
        loaded = datasets.load_from_disk(str(path))
    except Exception as error:
        raise data_error(
            name, "must be a readable save_to_disk folder", _first_line(error), "Write the folder again."
        ) from None
    if isinstance(loaded, datasets.DatasetDict):
        if split not in loaded:
            raise _no_split(name, split, list(loaded))
        return (Part(name, folder=path / split, dataset=loaded[split]),)
    return (Part(name, folder=path, dataset=loaded),)


def _hub(name: str, repository: str, split: str, subset: str | None, revision: str | None) -> Part:
    # A failed download has as many exception types as there are layers below; all mean the same to the user.
    try:
        loaded = datasets.load_dataset(repository, subset, split=split, revision=revision)
    except Exception as error:
        raise data_error(
            name,
            f"must be an existing file or a dataset on the hub with a split {split!r}",
            f"{type(error).__name__}: {_first_line(error)}",
            "Correct the name, or --dataset_config for the subset, or pass a local file.",
        ) from None
    return Part(name, dataset=loaded)


def _no_split(name: str, split: str, known: list[str]) -> Exception:
    return data_error(
        name,
        f"must have the split {split!r}",
        f"the splits {', '.join(known)}",
        "Pass --dataset_split or --eval_split.",
    )


def _first_line(error: Exception) -> str:
    return shorten(str(error).strip().split("\n")[0] or type(error).__name__, 160)
