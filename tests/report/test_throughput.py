"""The use of the hardware in numbers."""

import pytest
import torch

from openkto.report import throughput
from openkto.report.throughput import StepCounts, Throughput


def test_mfu_is_useful_work_over_the_peak_of_all_devices(monkeypatch):
    monkeypatch.setattr(throughput, "device_peak_flops", lambda device: 1e6)
    rates = Throughput(2, torch.device("cpu"))
    counts = StepCounts(rows=4, matched_tokens=70, mismatched_tokens=30, slots=200, same_prompt=0, same_completion=0)
    rates.add(counts, 0.5, 1e5)
    rates.add(counts, 0.3, 1e5)
    assert rates.flops == 2e5
    assert rates.values(flops=4e5)["mfu"] == pytest.approx(4e5 / 0.8 / 2e6)
    rates.reset()
    assert rates.flops == 0
