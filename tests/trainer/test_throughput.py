"""The useful work of a step in numbers."""

import pytest
import torch

from openkto.trainer import throughput
from openkto.trainer.throughput import StepCounts, Throughput


@pytest.mark.parametrize(("trainable", "passes"), [(100, 3), (0, 2), (10, 2.1)])
def test_frozen_weights_cost_no_gradient_of_their_own(trainable, passes, monkeypatch):
    monkeypatch.setattr(throughput, "device_peak_flops", lambda device: 1e6)
    rates = Throughput(100, trainable, 2, torch.device("cpu"))
    rates.add(
        StepCounts(rows=4, matched_tokens=70, mismatched_tokens=30, slots=200, same_prompt=0, same_completion=0), 0.5
    )
    # Two FLOPs a weight and token: training on the matched, then the policy on the mismatched, the reference on both.
    assert rates.values()["mfu"] == pytest.approx(2 * 100 * (passes * 70 + 30 + 100) / 0.5 / 2e6)
