"""What the benchmarks count, draw and print; the GPU's script runs from end to end in tiny shapes on a CPU."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.flops_over_least import of_cache, of_epoch
from benchmarks.gpu.budget import Budget
from benchmarks.material import (
    COMPLETION_LENGTHS,
    PROMPT_LENGTHS,
    draw_length,
    draw_rows,
    draw_shares,
    read_tokens,
)
from benchmarks.vs_trl_table import Rows, lines, measure
from benchmarks.watch import StepWatch
from openkto.batches.loader import KTODataLoader
from openkto.report.flops import ForwardWork, StepWork
from tests.ranks import run_ranks
from tests.tiny import TokenRowList, make_trainer, quiet_args, token_rows

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
@pytest.mark.timeout(2000)
def test_the_gpus_script_runs_on_a_cpu():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--tiny", "--minutes", "30"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "left out" not in done.stdout
    assert "| 1B full, reference in the loop, --share_prompts on |" in done.stdout
    assert "| 1B full, reference in the loop, --share_prompts off |" in done.stdout
    assert "| 8B LoRA, ZeRO 1 |" in done.stdout
    assert "one step of 1B full, ZeRO 1" in done.stdout


def test_every_script_starts_when_it_is_called():
    scripts = {path: path.read_text(encoding="utf-8") for path in (ROOT / "benchmarks").rglob("*.py")}
    called = {path.name: text for path, text in scripts.items() if f"python -m benchmarks.{path.stem}" in text}
    assert len(called) > 10
    assert [name for name, text in called.items() if 'if __name__ == "__main__":' not in text] == []


def test_drawn_rows_are_as_long_as_real_ones():
    assert [draw_length(PROMPT_LENGTHS, percent) for percent in (0, 50, 75, 100)] == [32, 524, 2138, 13353]
    assert draw_length(COMPLETION_LENGTHS, 62.5) == round((1054 * 2053) ** 0.5)
    rows = draw_rows(400)
    assert sum(row["label"] for row in rows) == 200
    completions = sorted(len(row["completion"][0]["content"]) for row in rows)
    assert completions[200] == pytest.approx(1054, rel=0.25)


def test_drawn_prompts_have_their_share_of_the_tokens(tmp_path):
    for share in (0.2, 0.8):
        rows = draw_shares(40, 100, share, answers=2)
        assert rows == draw_shares(40, 100, share, answers=2)
        (tmp_path / f"{share}").mkdir()
        data = read_tokens(tmp_path / f"{share}", rows, 8192, 1000)
        tokens = data.prompt_lengths.sum() + data.completion_lengths.sum()
        assert tokens == pytest.approx(40 * 100, rel=0.15)
        assert data.prompt_lengths.sum() / tokens == pytest.approx(share, abs=0.07)
        assert np.unique(data.prompt_keys, return_counts=True)[1].tolist() == [2] * 20


def test_drawn_lengths_are_spread_as_asked_for():
    words = np.array([len(row["completion"][0]["content"].split()) for row in draw_shares(800, 400, 0.5, spread=1.0)])
    assert np.log(words).std() == pytest.approx(1.0, abs=0.1)
    assert words.mean() == pytest.approx(200, rel=0.15)


def watched_steps(folder):
    watch = StepWatch()
    trainer, _ = make_trainer(token_rows([True, False] * 8), batch=8, steps=3)
    trainer.fit(quiet_args(folder, 3))
    return watch.steps


def test_steps_are_watched_from_outside(tmp_path):
    (steps,) = run_ranks(watched_steps, 1, tmp_path, tmp_path / "out")
    assert [step["rows"] for step in steps] == [8, 8, 8]
    assert all(sum(step["parts"].values()) == pytest.approx(step["seconds"]) for step in steps)
    assert all({"matched forward", "mismatched forward", "backward"} <= set(step["parts"]) for step in steps)
    assert steps[0]["ended"] < steps[1]["ended"]


# A body of 10 weights, a head of 3, all of them training, and attention of size 2.
WORK = ForwardWork(10, 3, 10, 3, ((None, 2),))


def forward_flops(length: int, scored: int, reused: int = 0) -> int:
    """Return the work of a row's forward, of whose tokens the first few have run before."""
    pairs = length * (length + 1) // 2 - reused * (reused + 1) // 2
    return 2 * (10 * (length - reused) + 3 * scored) + 8 * pairs


def rows_of(prompt: int, completion: int, answers: int) -> TokenRowList:
    """Return 8 rows of prompts and completions of these lengths, of which so many have a prompt in common."""
    rows = token_rows([True, False] * 4, answers=answers)
    for i, item in enumerate(rows.items):
        item["prompt_ids"], item["completion_ids"] = [4 + i // answers] * prompt, [20 + i] * completion
        item["completion_mask"] = [True] * completion
    return TokenRowList(rows.items, rows.prompt_keys)


@pytest.mark.parametrize("shares", [False, True])
def test_flops_computed_are_those_of_the_layout_and_the_least_has_each_prompt_once(shares):
    loader = KTODataLoader(rows_of(6, 4, answers=1), 8, 8)
    loader.layout = replace(loader.layout, packed=True, shares_prompts=shares, shares_pairs=shares)
    ours, least = of_epoch(loader, StepWork(WORK, WORK))
    # A backward is twice a forward, with the head once more: computed, and no part of the least.
    training = 3 * forward_flops(10, 4)
    assert (ours.matched, least.matched) == (8 * (training + 2 * 3 * 4), 8 * training)
    # Of the mismatched pairs the least has only the completion, which attends to its prompt, too.
    assert (ours.mismatched, least.mismatched) == (8 * forward_flops(10, 4), 8 * forward_flops(10, 4, 6))
    apart, shared = 16 * forward_flops(10, 4), 8 * (forward_flops(10, 4) + forward_flops(10, 4, 6))
    assert (ours.reference, least.reference) == (shared if shares else apart, shared)
    # Three epochs pair each row with up to three others.
    computed, lowest = of_cache(loader, 3, WORK)
    pairs = round((lowest - 8 * forward_flops(6, 0)) / forward_flops(10, 4, 6))
    assert lowest == 8 * forward_flops(6, 0) + pairs * forward_flops(10, 4, 6)
    assert 16 < pairs <= 32
    assert computed == (lowest if shares else pairs * forward_flops(10, 4))


def test_a_prompt_of_two_rows_is_once_among_the_least():
    loader = KTODataLoader(rows_of(6, 4, answers=2), 8, 8)
    loader.layout = replace(loader.layout, packed=True, shares_prompts=True, shares_pairs=True)
    ours, least = of_epoch(loader, StepWork(WORK, WORK))
    assert least.matched == 4 * 3 * (forward_flops(10, 4) + forward_flops(10, 4, 6))
    assert ours.matched == 8 * (3 * forward_flops(10, 4) + 2 * 3 * 4)
    assert ours.reference == least.reference == 4 * (forward_flops(10, 4) + 3 * forward_flops(10, 4, 6))


def result(imported: float, began: float, step: float, steps: int, reference: float) -> dict:
    """Return what a side's process saw whose steps take the same time, and whose saving takes 2 seconds."""
    ended = [began + step * (i + 1) for i in range(steps)]
    return {
        "imported": imported, "reference": reference, "began": began, "ended": ended, "saved": ended[-1] + 2.0,
        "base_gib": 0.5, "peak_gib": [1.0] * steps, "torch": "2",
    }  # fmt: skip


def test_the_table_has_a_step_and_whole_epochs_in_ratio_to_openkto():
    rows = Rows(batch=8, steps=2, tokens=1600, prompt_tokens=800)
    ours = [{1: result(10, 16, 3, 2, 4.0), 3: result(10, 20, 3, 6, 8.0)}]
    # TRL's three epochs are run, and one epoch is read off them: to the end of its second step, and the saving.
    theirs = [{3: result(12, 20, 6, 6, 5.0)}]
    found = measure(theirs, rows, [1, 3])
    assert (found.step, found.total, found.reference) == (6.0, {1: 34.0, 3: 58.0}, {1: 5.0, 3: 5.0})
    own, other, failed = lines("rows", rows, {"a": ours, "b": theirs, "c": []}, {"a": "A", "b": "B", "c": "C"}, [1, 3])
    assert own.startswith(
        "| rows: 100 tokens a row, prompts 50% | A | 3.00 | 1.00 | 24.0 (4.0) | 1.00 | 1.00 | 40.0 (8.0)"
    )
    assert (
        "| B | 6.00 | 2.00 | 34.0 (5.0) | 1.42 | 1.57 | 58.0 (5.0) | 1.45 | 1.53 | 12.0 | 1.00 (0.50) | 1.00 |" in other
    )
    assert failed.endswith("| C | failed |")


def test_a_process_that_fails_is_said_with_its_reason_and_takes_nothing_with_it(tmp_path, capsys):
    budget = Budget(9.0, tmp_path, tmp_path / "out.json")
    budget.keep("first", {"a": 1})
    assert budget.run("no such", "benchmarks.gpu.nothing", {}, 30) is None
    assert budget.run("no result", "json.tool", {}, 30) is None
    assert "No module named benchmarks.gpu.nothing" in capsys.readouterr().out
    kept = json.loads((tmp_path / "out.json").read_text())
    assert kept["first"] == {"a": 1}
    assert kept["left out"][0].startswith("no such: ended with status 1; its last line: ")
    assert "No module named benchmarks.gpu.nothing" in kept["left out"][0]
    assert kept["left out"][1].startswith("no result: left no result (")
    assert Budget(0.1, tmp_path, None).run("late", "json.tool", {}, 30) is None
