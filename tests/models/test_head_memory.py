"""The benchmark of the head's memory keeps its promise: under a quarter of the float32 logits, forward and backward."""

import subprocess
import sys
from pathlib import Path


def test_log_probs_cost_under_a_quarter_of_the_logits_memory():
    root = Path(__file__).parent.parent.parent
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.head_memory"], cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
