"""The documentation's code and commands run."""

import json
import re
from pathlib import Path

from tests.ranks import run_ranks
from tests.text_rows import write_model, write_rows

DOCS = Path(__file__).parent.parent / "docs"


def run_library_example(folder):
    code = re.search(r"```python\n(.*?)```", (DOCS / "library.md").read_text(), re.DOTALL)[1]
    for placeholder, real in (
        ("path/to/model", "model"),
        ("path/to/rows.jsonl", "rows.jsonl"),
        ('"out"', f'"{folder}/out"'),
    ):
        assert placeholder in code
        code = code.replace(placeholder, real if real.startswith('"') else f"{folder}/{real}")
    exec(compile(code, "library.md", "exec"), {})


def test_the_library_example_trains_evaluates_and_saves(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENKTO_CACHE", str(tmp_path / "cache"))
    write_model(tmp_path / "model")
    write_rows(tmp_path / "rows.jsonl", 20)
    run_ranks(run_library_example, 2, tmp_path, tmp_path)
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    assert kinds == ["run", "train", "eval", "summary"]
    assert (tmp_path / "out/model.safetensors").exists()
