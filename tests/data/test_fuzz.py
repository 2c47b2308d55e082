"""Damaged files of every container give right rows or one sentence with its place, never a traceback."""

import json
import random
from pathlib import Path
from typing import Literal

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from openkto.data.dataset import UnpairedPreferenceDataset
from openkto.errors import DataError
from tests.tokenizers_for_tests import byte_tokenizer

TOKENIZER = byte_tokenizer(bos="on")
FORMS = {
    "texts": [{"prompt": f"p{n}", "completion": f" c{n} ü", "label": n % 2 == 0} for n in range(6)],
    "messages": [
        {
            "messages": [{"role": "user", "content": f"p{n}"}, {"role": "assistant", "content": f"c{n}"}],
            "label": n % 2,
        }
        for n in range(6)
    ],
    "pairs": [
        {
            "conversations": [{"from": "human", "value": f"p{n}"}],
            "chosen": {"from": "gpt", "value": f"c{n}"},
            "rejected": {"from": "gpt", "value": f"d{n}"},
        }
        for n in range(6)
    ],
}
PIECES = [
    *(
        b"null",
        b'"',
        b"{",
        b"}",
        b"[",
        b"]",
        b",",
        b":",
        b"\\",
        b"\n",
        b" ",
        b"\0",
        b"\xff",
        b"\xef\xbb\xbf",
        b"-1",
        b"1e999",
    ),
    *(b"NaN", b"true", b"\\ud800", b'"label"', b'"prompt": 1,', b"assistant", b"9" * 5000, b"[" * 2000),
]


def contents(tmp_path: Path, suffix: str, rows: list[dict]) -> bytes:
    path = tmp_path / f"whole{suffix}"
    if suffix == ".jsonl":
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    elif suffix == ".json":
        path.write_text(json.dumps(rows, indent=1, ensure_ascii=False), encoding="utf-8")
    elif suffix == ".csv":
        lines = [f'{row["prompt"]},"{row["completion"]}",{row["label"]}' for row in rows]
        path.write_text("\n".join(["prompt,completion,label", *lines]), encoding="utf-8")
    elif suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        table = pa.Table.from_pylist(rows)
        with pa.ipc.new_stream(str(path), table.schema) as writer:
            writer.write_table(table)
    return path.read_bytes()


def mutate(content: bytes, rng: random.Random) -> bytes:
    for _ in range(rng.randint(1, 3)):
        start = rng.randrange(len(content) + 1)
        end = min(len(content), start + rng.choice([0, 0, 1, 2, 20, 200]))
        change = rng.randrange(5)
        if change == 0:
            middle = rng.choice(PIECES)
        elif change == 1:
            middle = bytes(rng.randrange(256) for _ in range(rng.randint(1, 4)))
        elif change == 2:
            middle = b""
        elif change == 3:
            middle = content[start:end] * 2
        else:
            middle, end = b"", len(content) if rng.random() < 0.2 else end
        content = content[:start] + middle + content[end:]
    return content


def outcome(path: Path, on_bad_rows: Literal["error", "skip"]) -> str:
    """Return "rows" or "error" after checking that they are rows, or one sentence with its place."""
    try:
        dataset = UnpairedPreferenceDataset(path, TOKENIZER, 512, on_bad_rows=on_bad_rows)
    except DataError as error:
        message = str(error)
    else:
        assert all(dataset[i]["completion_ids"] for i in range(len(dataset)))
        return "rows"
    assert message.startswith(str(path)), message
    assert "; got " in message, message
    assert "\n" not in message, message
    assert len(message) < 800, message
    message.encode("utf-8")
    return "error"


CASES = [
    *((suffix, form) for suffix in (".jsonl", ".json", ".parquet", ".arrow") for form in FORMS),
    (".csv", "texts"),
]


@pytest.mark.parametrize("mutations", [40, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("suffix", "form"), CASES)
def test_a_damaged_file_gives_rows_or_one_sentence(tmp_path, suffix, form, mutations):
    rng = random.Random(f"{suffix} {form}")
    whole = contents(tmp_path, suffix, FORMS[form])
    outcomes = {"rows": 0, "error": 0}
    for number in range(mutations):
        path = tmp_path / f"data{suffix}"
        path.write_bytes(mutate(whole, rng))
        outcomes[outcome(path, "skip" if number % 3 == 0 else "error")] += 1
    assert min(outcomes.values()) > 0, outcomes


def test_a_damaged_folder_gives_rows_or_one_sentence(tmp_path):
    rng = random.Random(0)
    folder = tmp_path / "saved"
    datasets.Dataset.from_list(FORMS["messages"]).save_to_disk(str(folder))
    files = {file: file.read_bytes() for file in sorted(folder.iterdir())}
    for _ in range(100):
        damaged = rng.choice(list(files))
        damaged.write_bytes(mutate(files[damaged], rng))
        outcome(folder, "error")
        damaged.write_bytes(files[damaged])
