"""How long does `openkto inspect` take for short rows, and how much memory?

    python -m benchmarks.inspect_rows [MODEL FOLDER] [--rows 100000 1000000]

Without a folder a byte-level tokenizer of the tests serves. Of the rows 0.1% repeat an earlier one, 0.1% nearly do, and
2% have the other class's label. Each number is of a process of its own, with a cache of its own: the command's whole
time and its highest resident memory.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.text_rows import byte_tokenizer

THINGS = "parcel shirt lamp kettle code refund invoice account password address bicycle chair label phone cable"
ASKS = (
    "Where is my {}?",
    "How do I return the {}?",
    "The {} does not work.",
    "Can I change the {}?",
    "Whose is the {}?",
)
GOOD = "gladly certainly thanks done today sorry help sent ready free tomorrow fixed checked enjoy welcome"
BAD = "no never whatever wait policy cannot section terms elsewhere closed denied unclear later refused void"
COMMON = "the a we you it is was order number from our shop for with on at by this that has"
KEPT = 1000  # rows that a copy may be made of
GIB = 2**20  # in the KiB that Linux counts memory in


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a folder with a tokenizer")
    parser.add_argument("--rows", type=int, nargs="+", default=[100_000])
    args = parser.parse_args()
    print("| rows | file, MB | seconds | peak, GiB |\n|---|---|---|---|", flush=True)
    for count in args.rows:
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / "rows.jsonl"
            with path.open("w", encoding="utf-8") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows_of(count))
            seconds, peak = measure(path, args.model or write_tokenizer(Path(scratch) / "model"))
            print(f"| {count:,} | {path.stat().st_size / 1e6:.0f} | {seconds:.0f} | {peak / GIB:.2f} |", flush=True)


def rows_of(count: int, seed: int = 0) -> Iterator[dict[str, object]]:
    """Yield rows of a question with a number of its own, an answer and a label."""
    chance = random.Random(seed)
    things, good, bad, common = (words.split() for words in (THINGS, GOOD, BAD, COMMON))
    earlier: list[dict[str, object]] = []
    for number in range(count):
        draw = chance.random()
        if earlier and draw < 0.002:
            row = chance.choice(earlier)
            yield row if draw < 0.001 else row | {"completion": f"{row['completion']}!".upper()}
            continue
        label = chance.random() < 0.5
        words = chance.choices(good if label else bad, k=4) + chance.choices(common, k=14)
        chance.shuffle(words)
        asked = chance.choice(ASKS).format(chance.choice(things))
        prompt = f"{asked} {' '.join(chance.choices(common, k=4))} {number}"
        row = {"prompt": prompt, "completion": f" {' '.join(words)} {number}.", "label": label != (draw > 0.98)}
        if len(earlier) < KEPT:
            earlier.append(row)
        yield row


def write_tokenizer(folder: Path) -> Path:
    """Save what inspect reads of a model: its tokenizer and its configuration."""
    byte_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


def measure(path: Path, model: Path | str) -> tuple[float, int]:
    """Return the seconds and the highest resident KiB of an inspection."""
    command = [sys.executable, "-m", "openkto", "inspect", "--pretrain", str(model), "--dataset", str(path)]
    command += ["--apply_chat_template", "--data_cache_dir", str(path.parent / "cache")]
    command += ["--output", str(path.parent / "page.html")]
    start = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"openkto inspect ended with status {process.returncode}")
    return time.monotonic() - start, used.ru_maxrss


if __name__ == "__main__":
    main()
