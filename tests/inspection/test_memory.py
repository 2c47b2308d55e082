"""The memory of an inspection hardly grows with the rows."""

import random
import tracemalloc
from pathlib import Path

import numpy as np

from openkto.data.chosen_rows import choose_rows
from openkto.data.prepare import Prepared, _record_batch
from openkto.data.prepared_rows import PreparedRows
from openkto.data.row import Row
from openkto.data.sources import Source
from openkto.data.tokenize import TokenizedRow
from openkto.data.truncation import Limit
from openkto.inspection import label_errors, near_duplicates, words
from openkto.inspection.column import first_of_equal, numbered
from openkto.inspection.result import Inspection, inspection_of
from openkto.inspection.seen import SeenRows
from tests.text_rows import byte_tokenizer

BYTES_A_ROW = 100
BATCH = 1000


def inspected(count: int, folder: Path) -> tuple[Inspection, int]:
    """Return what is found in rows of which every tenth has a fault of each kind, and the most bytes held."""
    folder.mkdir()
    chance = random.Random(0)
    with (folder / "listed").open("w") as listed:
        tracemalloc.start()
        seen = SeenRows(byte_tokenizer(), folder, listed)
        for start in range(0, count, BATCH):
            rows = []
            for number in range(start, start + BATCH):
                said = number - number % 10 if number % 10 == 1 else number  # a copy of the row before
                label, is_long = said % 2 == 0, number % 10 == 2
                answer = " ".join(["good" if label else "bad", *chance.choices("abcdefgh", k=6), str(said)])
                row = Row(f"rows.jsonl:{number}", f"what is {said}", answer, label)
                ids = [said % 251, said // 251, *([7] * 40 * is_long)]
                rows.append(
                    (number, row, TokenizedRow(ids, ids, [True] * len(ids), False, False, False, ("left plain",)))
                )
            seen.see(rows, _record_batch(rows))
        prepared = PreparedRows("rows", [Source("rows", ())], Prepared(count, [count]), folder / "none")
        limit = Limit(60, "completion")
        chosen = choose_rows(prepared, seen.columns(), None, limit=limit, probs=None, seed=0)
        found = inspection_of("rows", seen, chosen, limit, (1.0, 1.0))
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    return found, most


def test_more_rows_take_little_more_memory(tmp_path, monkeypatch):
    # Parts so small that both counts have several, and no words that are remembered up to a number of them.
    monkeypatch.setattr(words, "_number", words._number.__wrapped__)
    monkeypatch.setattr(label_errors, "BUCKETS", 2**10)
    monkeypatch.setattr(words, "CHUNK_WORDS", 5000)
    monkeypatch.setattr(near_duplicates, "ROWS_AT_A_TIME", 1000)
    (_, small), (found, large) = (inspected(count, tmp_path / str(count)) for count in (2000, 8000))
    assert (large - small) / 6000 < BYTES_A_ROW
    counts = {finding.kind: finding.count for finding in found.findings}
    assert counts["exact duplicate"] == 800
    assert counts["cut at max_len"] == 800
    assert counts["left plain"] == counts["no template"] == 8000


def test_equal_values_get_one_number_and_are_led_to_the_first():
    values = np.array([5, 2, 5, 9, 2, 5])
    assert numbered(values).tolist() == [1, 0, 1, 2, 0, 1]
    assert first_of_equal(values).tolist() == [0, 1, 0, 3, 1, 0]
    assert numbered(values[:0]).tolist() == first_of_equal(values[:0]).tolist() == []
