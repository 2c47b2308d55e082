"""Find the data files of a split in a folder that was downloaded from the Hub, by the rules of the datasets library."""

from collections.abc import Mapping
from pathlib import Path

from datasets.data_files import get_data_patterns, resolve_pattern, sanitize_patterns
from datasets.utils.metadata import MetadataConfigs
from huggingface_hub import DatasetCard

from openkto.data.problems import data_error, shorten


def files_of_split(folder: Path, name: str, split: str, subset: str | None) -> list[Path]:
    """Return the files of a split, sorted; none where the folder holds no data.

    The README's `configs` say which they are, else the names of files and folders do, as in data/train-00000.parquet.

    Raises:
        DataError: there is no such split or subset, or the README cannot be read.
    """
    # The library raises whatever its parts raise on what stands there, so the list of types is open.
    try:
        patterns = _patterns_of_readme(folder, name, subset) or get_data_patterns(str(folder))
    except FileNotFoundError:
        return []
    if split not in patterns:
        known = ", ".join(map(str, patterns))
        cure = "Pass --dataset_split or --eval_split."
        raise data_error(name, f"must have the split {split!r}", f"the splits {known}", cure)
    found: set[str] = set()
    for pattern in patterns[split]:
        try:
            found.update(resolve_pattern(pattern, str(folder)))
        except FileNotFoundError:
            raise data_error(
                name, f"must hold the files of the split {split!r}", f"none that match {pattern}", "Download them, too."
            ) from None
    return [Path(path) for path in sorted(found)]


def _patterns_of_readme(folder: Path, name: str, subset: str | None) -> Mapping[object, list[str]] | None:
    """Return the patterns by split of the subset that is asked for; None where the README has no configs."""
    readme = folder / "README.md"
    text = readme.read_text(encoding="utf-8", errors="replace") if readme.is_file() else ""
    if "\nconfigs:" not in text:
        return None
    try:
        configs = MetadataConfigs.from_dataset_card_data(DatasetCard(text).data)
    except Exception as error:
        got = shorten(str(error).strip().split("\n")[0], 120)
        raise data_error(str(readme), "its configs must be readable", got, "Correct them, or name the files.") from None
    chosen = subset or next((one for one, values in configs.items() if values.get("default")), None)
    chosen = chosen or (next(iter(configs)) if len(configs) == 1 else "default")
    if chosen not in configs:
        rule = f"must have the subset {subset!r}" if subset else "one of the subsets must be chosen"
        cure = "Name one with --dataset_config."
        raise data_error(name, rule, f"the subsets {', '.join(configs)}", cure)
    if "data_files" not in configs[chosen]:
        return None
    return sanitize_patterns(configs[chosen]["data_files"])
