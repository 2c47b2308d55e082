"""What was freed goes back to the system."""

import os
from pathlib import Path

import pytest
import torch

from openkto.distributed import heap, strategy


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.skipif(heap._TRIM is None, reason="the C library is not glibc")
def test_holes_in_the_heap_go_back():
    blocks = [torch.ones(2**14) for _ in range(4096)]  # 64 KiB each, 256 MiB
    kept = blocks[::16]
    del blocks
    before = resident_mib()
    heap.give_back_free_pages()
    assert before - resident_mib() > 200
    assert all(block.sum() == 2**14 for block in kept)


def test_another_c_library_keeps_them(monkeypatch):
    monkeypatch.setattr(heap, "_TRIM", None)
    heap.give_back_free_pages()


@pytest.mark.parametrize(("device", "times"), [("cpu", 1), ("cuda", 0)])
def test_it_is_done_after_each_backward_pass_on_a_cpu(monkeypatch, device, times):
    events = []

    class Engine:
        def set_gradient_accumulation_boundary(self, is_last):
            pass

        def backward(self, loss, *, scale_wrt_gas):
            events.append("backward")

    monkeypatch.setattr(strategy, "give_back_free_pages", lambda: events.append("give back"))
    own = strategy.DeepspeedStrategy(zero_stage=0, param_dtype="fp32")
    own.device = torch.device(device)
    own.backward(Engine(), torch.tensor(1.0), is_last=True)
    assert events == ["backward"] + ["give back"] * times
