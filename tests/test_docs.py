"""The documentation's code and commands run."""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from openkto.config import LOSSES, eval_sets, from_yaml, to_yaml
from openkto.config.flags import parse
from openkto.data.dataset import UnpairedPreferenceDataset
from openkto.data.sources import SourceSettings
from tests.ranks import run_ranks
from tests.text_rows import byte_tokenizer, write_model, write_rows

DOCS = Path(__file__).parent.parent / "docs"


def run_library_example(folder):
    os.chdir(folder)
    for code in re.findall(r"```python\n(.*?)```", (DOCS / "library.md").read_text(), re.DOTALL):
        exec(compile(code, "library.md", "exec"), {})


def test_the_losses_page_has_a_line_for_each():
    lines = (DOCS / "losses.md").read_text().splitlines()
    rows = [line.split("|")[1].strip() for line in lines if line.startswith("| `")]
    assert rows[0] == "`--loss_type`"
    assert sorted(rows[1 : 1 + len(LOSSES)]) == sorted(f"`{name}`" for name in LOSSES)


def test_the_library_example_trains_evaluates_and_saves(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENKTO_CACHE", str(tmp_path / "cache"))
    write_model(tmp_path / "path/or/name")
    write_rows(tmp_path / "rows.jsonl", 20)
    run_ranks(run_library_example, 2, tmp_path, tmp_path)
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    assert kinds == ["run", "train", "eval", "summary"]
    assert (tmp_path / "out/model.safetensors").exists()


@pytest.mark.slow
def test_the_memory_page_holds_the_computed_tables():
    shown = subprocess.run([sys.executable, DOCS / "make_memory_table.py"], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() in (DOCS / "memory.md").read_text()


def test_the_smallest_model_of_the_memory_page_is_computed():
    table = runpy.run_path(str(DOCS / "make_memory_table.py"))
    cells = [table["cell"](table["SHAPES"][0], ranks, 8192, "LoRA") for ranks in table["GPUS"]]
    assert f"| 1B | {' | '.join(cells)} |" in (DOCS / "memory.md").read_text()


def test_the_example_of_entries_with_settings_of_their_own_reads_its_rows(tmp_path, monkeypatch):
    (example,) = re.findall(r"```yaml\n(dataset:.*?)```", (DOCS / "data.md").read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENKTO_CACHE", str(tmp_path / "cache"))
    rows = [{"prompt": "a", "completion": "b", "label": True}, {"prompt": "a", "completion": "c", "label": False}]
    (tmp_path / "thumbs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "stars.csv").write_text("question,answer,stars\nq,five,5\nq,three,3\nq,two,2\n")
    (tmp_path / "held_out.csv").write_text("question,answer,stars\nq,five,5\nq,three,3\n")
    verdicts = [{"prompt": "q", "completion": word, "verdict": word} for word in ("awful", "unsure", "great")]
    (tmp_path / "reviews.jsonl").write_text("".join(json.dumps(row) + "\n" for row in verdicts))
    (tmp_path / "run.yaml").write_text(f"pretrain: some/model\n{example}")
    config, _ = parse(["--config", "run.yaml"], "train")
    again = from_yaml(to_yaml(config))
    assert (again["dataset"], again["eval_dataset"]) == (config.data.dataset, config.data.eval_dataset)
    tokenizer = byte_tokenizer()
    trained = UnpairedPreferenceDataset(config.data.dataset, tokenizer)
    assert trained.labels.tolist() == [True, False, True, False, False, True]
    ((name, entry),) = eval_sets(config.data).items()
    assert name == "held_out_stars"
    assert UnpairedPreferenceDataset(
        [entry], tokenizer, source_settings=SourceSettings(split="test")
    ).labels.tolist() == [True, False]
