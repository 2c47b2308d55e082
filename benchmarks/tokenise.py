"""How long do 20,000 short rows take to read, tokenise and keep, and how long to open again?

    python -m benchmarks.tokenise [MODEL FOLDER]

Without a folder a byte-level tokenizer of the tests serves. Rows are texts, then the same as messages through the chat
template.
"""

import sys
import tempfile
import time
from pathlib import Path

from openkto.data.dataset import UnpairedPreferenceDataset
from openkto.models import load_tokenizer
from tests.text_rows import byte_tokenizer, write_rows

ROWS = 20_000


def main() -> None:
    """Print the table."""
    tokenizer = load_tokenizer(sys.argv[1]) if len(sys.argv) > 1 else byte_tokenizer()
    print(f"{'rows':10} {'first time, s':>14} {'rows/s':>10} {'again, s':>10}")
    with tempfile.TemporaryDirectory() as scratch:
        for name, messages in (("texts", False), ("messages", True)):
            path = write_rows(Path(scratch) / f"{name}.jsonl", ROWS, messages)
            seconds = []
            for _ in range(2):
                started = time.perf_counter()
                UnpairedPreferenceDataset(path, tokenizer, cache_dir=Path(scratch) / "cache")
                seconds.append(time.perf_counter() - started)
            print(f"{name:10} {seconds[0]:14.1f} {ROWS / seconds[0]:10.0f} {seconds[1]:10.2f}")


if __name__ == "__main__":
    main()
