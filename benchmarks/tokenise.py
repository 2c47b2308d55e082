"""How long do short rows take to read, tokenise and keep, and how long to open again? And how much memory?

    python -m benchmarks.tokenise [MODEL FOLDER] [--rows 20000 1000000] [--forms texts messages csv]

Without a folder a byte-level tokenizer of the tests serves. Rows are texts in JSON, the same as messages through the
chat template, or texts in CSV. Each number is of a process of its own: its highest resident memory, less what it had
before it read anything.
"""

import argparse
import csv
import json
import multiprocessing
import re
import tempfile
import time
from pathlib import Path

from openkto.data.dataset import UnpairedPreferenceDataset
from openkto.models import load_tokenizer
from tests.text_rows import byte_tokenizer, write_rows

FORMS = ("texts", "messages", "csv")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a folder with a tokenizer")
    parser.add_argument("--rows", type=int, nargs="+", default=[20_000])
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS)
    args = parser.parse_args()
    print("| rows | first time, s | rows/s | peak, MiB | again, s | peak, MiB |\n|---|---|---|---|---|---|", flush=True)
    fresh = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as scratch, fresh.Pool(1, maxtasksperchild=1) as pool:
        for form in args.forms:
            for count in args.rows:
                path = write_file(Path(scratch), form, count)
                task = (path, args.model, Path(scratch) / "cache")
                (first, peak), (again, peak_again) = (pool.apply(measure, task) for _ in range(2))
                numbers = f"{first:.1f} | {count / first:.0f} | {peak:.0f} | {again:.2f} | {peak_again:.0f}"
                print(f"| {count:,} {form} | {numbers} |", flush=True)


def write_file(folder: Path, form: str, count: int) -> Path:
    """Save so many rows in a form."""
    path = write_rows(folder / f"{form}-{count}.jsonl", count, form == "messages")
    if form != "csv":
        return path
    with path.open(encoding="utf-8") as rows, path.with_suffix(".csv").open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file)
        table.writerow(("prompt", "completion", "label"))
        table.writerows(json.loads(row).values() for row in rows)
    return path.with_suffix(".csv")


def measure(path: Path, model: str | None, cache: Path) -> tuple[float, float]:
    """Return the seconds that rows take to be there, and by how many MiB the process grew."""
    tokenizer = load_tokenizer(model) if model else byte_tokenizer()
    before = peak_mib()
    started = time.perf_counter()
    UnpairedPreferenceDataset(path, tokenizer, cache_dir=cache)
    seconds = time.perf_counter() - started
    return seconds, peak_mib() - before


def peak_mib() -> float:
    """Return this program's highest resident memory; getrusage would count its parent's, too."""
    (line,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    return int(line) / 1024


if __name__ == "__main__":
    main()
