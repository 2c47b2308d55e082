"""What the data tests share: a cache of their own, and files written in one line."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep tokenised rows out of the user's cache."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("OPENKTO_CACHE", str(folder))
    return folder


@pytest.fixture
def write_lines(tmp_path: Path) -> Callable[..., Path]:
    """Write rows as JSON lines; a text is written as it is."""

    def write(rows: list, name: str = "rows.jsonl") -> Path:
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        path = tmp_path / name
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path

    return write
