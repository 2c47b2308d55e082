"""The documentation's code and commands run."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from openkto.__main__ import COMMANDS
from openkto.commands import inspect, report, train
from openkto.config import LOSSES, eval_sets, from_yaml, to_yaml
from openkto.config.flags import parse
from openkto.data.dataset import UnpairedPreferenceDataset
from openkto.data.sources import SourceSettings
from tests.pages.made_runs import learning_run
from tests.ranks import run_ranks
from tests.text_rows import byte_tokenizer, write_model, write_rows

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


def test_the_losses_page_has_a_line_for_each():
    lines = (DOCS / "losses.md").read_text().splitlines()
    rows = [line.split("|")[1].strip() for line in lines if line.startswith("| `")]
    assert rows[0] == "`--loss_type`"
    assert sorted(rows[1 : 1 + len(LOSSES)]) == sorted(f"`{name}`" for name in LOSSES)


def test_the_library_example_trains_evaluates_and_saves(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENKTO_CACHE", str(tmp_path / "cache"))
    write_model(tmp_path / "model")
    write_rows(tmp_path / "rows.jsonl", 20)
    run_ranks(run_library_example, 2, tmp_path, tmp_path)
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    assert kinds == ["run", "train", "eval", "summary"]
    assert (tmp_path / "out/model.safetensors").exists()


def written_commands():
    """Return the words of each openkto command in the shell blocks of README and docs, with its launcher."""
    text = "".join(
        path.read_text()
        for path in (
            DOCS.parent / "README.md",
            *(DOCS / f"{n}.md" for n in ("lora", "reference", "parallel", "report", "inspect")),
        )
    )
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    lines = [line.partition("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [shlex.split(line) for line in lines if line.split()[:1] in (["openkto"], ["deepspeed"], ["torchrun"])]


@pytest.mark.parametrize("words", [w for w in written_commands() if w[1] == "report"], ids=" ".join)
def test_the_written_reports_are_made(words, tmp_path, monkeypatch):
    for name in ("out", "other_out"):
        learning_run(tmp_path / name, 4)
    monkeypatch.chdir(tmp_path)
    report.main(words[2:])
    assert {path.name for path in (tmp_path.glob("**/*.html"))} <= {"report.html", "page.html"}
    assert list(tmp_path.glob("**/*.html"))


@pytest.mark.parametrize("words", [w for w in written_commands() if w[1] == "inspect"], ids=" ".join)
def test_the_written_inspections_are_made(words, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OPENKTO_CACHE", str(tmp_path / "cache"))
    write_model(tmp_path / "path/or/name")
    write_rows(tmp_path / "rows.jsonl", 8)
    monkeypatch.chdir(tmp_path)
    inspect.main(words[2:])
    assert "desirable" in capsys.readouterr().out
    (page,) = tmp_path.glob("*.html")
    assert page.with_suffix(".rows.jsonl").exists()


@pytest.mark.parametrize("words", [w for w in written_commands() if w[1] not in ("report", "inspect")], ids=" ".join)
def test_the_written_commands_are_understood(words, tmp_path, monkeypatch):
    write_model(tmp_path / "path/or/name")
    write_rows(tmp_path / "rows.jsonl", 4)
    write_rows(tmp_path / "held_out.jsonl", 4)
    shutil.copytree(DOCS.parent / "configs", tmp_path / "configs")
    shutil.copytree(tmp_path / "path/or/name", tmp_path / "out")
    (tmp_path / "out/run.yaml").write_text("pretrain: path/or/name\ndataset: [rows.jsonl]\n")
    monkeypatch.chdir(tmp_path)
    command = next((name for name in COMMANDS if {name, f"cli/{name}.py"} & set(words)), "train")
    if command == "merge_lora":
        (tmp_path / "out/adapter_config.json").touch()
    start = 1 + max(words.index(w) for w in (command, "cli/train_kto.py", f"cli/{command}.py") if w in words)
    config, _ = parse(words[start:], command)
    assert Path(config.model.pretrain).is_dir()


@pytest.mark.parametrize("config", sorted((DOCS.parent / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_ready_run_trains(config, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENKTO_CACHE", str(tmp_path / "cache"))
    write_model(tmp_path / "model")
    write_rows(tmp_path / "rows.jsonl", 12)
    argv = ["--config", str(config), "--pretrain", f"{tmp_path}/model", "--dataset", f"{tmp_path}/rows.jsonl"]
    argv += ["--save_path", f"{tmp_path}/out", "--max_steps", "1", "--max_len", "128"]
    run_ranks(train.main, 2, tmp_path, argv)
    saved = "adapter_model.safetensors" if "lora" in config.stem else "model.safetensors"
    assert (tmp_path / "out" / saved).exists()


def test_the_memory_page_holds_the_computed_tables():
    shown = subprocess.run([sys.executable, DOCS / "make_memory_table.py"], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() in (DOCS / "memory.md").read_text()


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
