"""The GPU's script runs from end to end in tiny shapes on a CPU; drawn rows are as long as real ones."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.material import COMPLETION_LENGTHS, PROMPT_LENGTHS, draw_length, draw_rows

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
