"""The benchmark of the head's memory keeps its promise: under a quarter of the float32 logits, forward and backward."""

from benchmarks.head_memory import main
from tests.ranks import run_ranks


def test_log_probs_cost_under_a_quarter_of_the_logits_memory(tmp_path):
    assert run_ranks(main, 1, tmp_path) == [0]
