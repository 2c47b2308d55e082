"""The memory that is free, with a container's limit and without."""

import pytest

from openkto.distributed import free_memory as module

GIB = 2**30


@pytest.mark.parametrize(
    ("limit", "used", "cached", "free"),
    [(2 * GIB, 0, 0, 2 * GIB), (2 * GIB, GIB, GIB // 4, 1.25 * GIB), (GIB, 2 * GIB, 0, 0)],
)
def test_what_a_container_already_holds_is_not_free(limit, used, cached, free, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "CGROUP", tmp_path)
    unlimited = module.free_memory()
    assert unlimited > 0
    (tmp_path / "memory.max").write_text("max\n")
    assert module.free_memory() == pytest.approx(unlimited, rel=0.5)
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text(f"{used}\n")
    (tmp_path / "memory.stat").write_text(f"anon {used - cached}\ninactive_file {cached}\n")
    assert module.free_memory() <= free
    if unlimited > 2 * free:
        assert module.free_memory() == free
