"""Settings of all tests: one thread a process, since tiny models gain nothing from more and lose much on busy cores."""

import gc
import logging
import os
from pathlib import Path

import hypothesis
import pytest

# Imports make millions of objects that stay: to walk them again and again is half of the time that they take.
gc.disable()

# A busy machine makes single examples slow; pytest's own limit is what ends a test that hangs.
hypothesis.settings.register_profile("openkto", deadline=None)
hypothesis.settings.load_profile("openkto")
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the folders of long tests, so that only short ones are left when the first worker has no more."""
    items.sort(key=lambda item: item.path.parent.name not in ("tests", "trainer"))


def pytest_collection_finish() -> None:
    """Collect garbage again, but not among what was imported."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def same_log_level():
    """A command that a test runs here sets how much is logged; the next test starts as this one did."""
    logger = logging.getLogger("openkto")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a tiny model, rows to train on and rows to evaluate on, and a cache of its own."""
    from tests.text_rows import write_model, write_rows  # takes seconds, which most tests need not wait

    monkeypatch.setenv("OPENKTO_CACHE", str(tmp_path / "cache"))
    write_model(tmp_path / "model")
    write_rows(tmp_path / "rows.jsonl", 20)
    write_rows(tmp_path / "eval.jsonl", 7, messages=True)
    return tmp_path
