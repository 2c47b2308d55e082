"""What was freed goes back to the system."""

import os
from pathlib import Path

import pytest
import torch

from openkto.distributed import heap, strategy
from tests.ranks import run_ranks


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


class Engine:
    """Stands in for DeepSpeed's; its backward frees what a graph held."""

    def __init__(self, free):
        self.free = free

    def set_gradient_accumulation_boundary(self, is_last):
        pass

    def backward(self, loss, *, scale_wrt_gas):
        self.free()


def resident_after_steps():
    """Return the MiB in use before three steps of 256 MiB, and those that each step leaves resident besides."""
    heap.give_back_free_pages()
    own, kept, resident = strategy.DeepspeedStrategy(zero_stage=0, param_dtype="fp32"), [], []
    before, in_use = resident_mib(), heap._in_use() / 2**20
    for size in (4, 16, 64):  # KiB: 3 of 4 blocks leave a hole in which the next size finds no room
        blocks = [torch.ones(256 * size) for _ in range(2**18 // size)]
        kept += blocks[::4]
        own.backward(Engine(blocks.clear), torch.tensor(1.0), is_last=True)
        resident.append(resident_mib() - before)
    return in_use, resident


@pytest.mark.skipif(heap._INFO is None, reason="the C library does not tell what its heap holds")
def test_pages_stay_for_the_next_step_until_holes_add_up(tmp_path):
    """In a process of its own: what other tests have left in this one's heap moves the limit."""
    in_use, resident = run_ranks(resident_after_steps, 1, tmp_path)[0]
    assert in_use < 350  # the third step has 384 MiB more of it and 768 in its heap, which is above the limit then
    assert resident[0] > 250
    assert resident[1] > 500
    assert resident[2] < 400  # 192 are in use, and pages of small objects in between; 768 and more with all holes


def test_a_gpus_process_has_no_heap_to_look_at():
    own = strategy.DeepspeedStrategy(zero_stage=0, param_dtype="fp32")
    own.device, own.heap, ran = torch.device("cuda"), None, []
    own.backward(Engine(lambda: ran.append(True)), torch.tensor(1.0), is_last=True)
    assert ran == [True]


def test_holes_go_back_each_time_where_the_heap_cannot_be_asked(monkeypatch):
    given_back = []
    monkeypatch.setattr(heap, "_INFO", None)
    monkeypatch.setattr(heap, "_TRIM", given_back.append)
    own = heap.Heap()
    for _ in range(2):
        with own.during_backward():
            pass
    assert given_back == [0, 0]
