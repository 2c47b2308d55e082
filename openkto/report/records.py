"""The files that a run appends to, one JSON object per line: metrics.jsonl, batches.jsonl, rewards.jsonl
and samples.jsonl.

When a run starts they are carried on, cut back to a checkpoint's step, or set aside.
"""

import json
import logging
import os
from collections import Counter
from pathlib import Path
from typing import Any

from openkto.errors import ConfigError
from openkto.files import numbered

log = logging.getLogger(__name__)

Line = dict[str, Any]

METRICS, BATCHES, REWARDS, SAMPLES = "metrics.jsonl", "batches.jsonl", "rewards.jsonl", "samples.jsonl"
EARLY_STOP = "early stop"  # what `ended` of a summary begins with where the run was done before its last step
SAMPLE = "sample"  # what a line of samples.jsonl is counted as


class RecordFile:
    """A record that is open for more: one JSON object a line, with the system when `write` returns.

    Nothing that happens to it ends training: it may be moved, deleted or replaced, and the disk may be full.

    Raises:
        ConfigError: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._head: Line | None = None  # says whose record it is, for a file that has to be begun again
        self._has_warned = False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._open()
        except OSError as error:
            raise ConfigError(
                f"--save_path: must be a folder that can be written; got {str(path.parent)!r} ({path.name}: "
                f"{error.strerror}). Give another path."
            ) from None

    def _open(self) -> None:
        self._file = self._path.open("ab", buffering=0)
        self._is_cut = self._path.is_file() and _is_cut(self._path)

    def write(self, line: Line) -> None:
        """Append a line, or say that it was lost."""
        if line.get("kind") == "run":
            self._head = line
        try:
            if not self._is_in_place():
                self._begin_again(line["step"])
            self._append(line)
        except OSError as error:
            if not self._has_warned:
                log.warning("%s: a line was lost (%s); training continues.", self._path.name, error.strerror)
            self._has_warned = True

    def _append(self, line: Line) -> None:
        text = ("\n" if self._is_cut else "") + json.dumps(line, allow_nan=False, ensure_ascii=False) + "\n"
        content = text.encode("utf-8", errors="backslashreplace")
        size = os.fstat(self._file.fileno()).st_size
        try:
            written = self._file.write(content)
            if written != len(content):
                raise OSError(0, "No space left on device")
            self._is_cut = False
        except OSError:
            try:
                os.truncate(self._path, size)  # half a line is no JSON, and taking it back needs no space
            except OSError:
                self._is_cut = True
            raise

    def _is_in_place(self) -> bool:
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return False

    def _begin_again(self, step: int) -> None:
        log.warning("%s: was moved, deleted or replaced; what follows goes into the file there now.", self._path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file.close()
        self._open()
        if self._head is not None and os.fstat(self._file.fileno()).st_size == 0:
            self._append(self._head | {"step": step - 1})

    def sync(self) -> None:
        """Let the lines survive a power cut, as the checkpoint does that counts on them."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            log.warning("%s: could not be flushed (%s); training continues.", self._path.name, error.strerror)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _is_cut(record: Path) -> bool:
    """Whether a crash cut the last line short, so that it would swallow the next one."""
    with record.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        return file.read(1) not in (b"", b"\n")


def read_lines(record: Path) -> list[tuple[bytes, Line | None]]:
    """Return each line as it stands with what it says: an object with a step, or None where it is none."""
    if not record.is_file():
        return []
    return [(raw, _parse(raw)) for raw in record.read_bytes().splitlines(keepends=True)]


def _parse(raw: bytes) -> Line | None:
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) and isinstance(line.get("step"), int) else None


# ---- at a start -----------------------------------------------------------------------------------------------------


def belongs_to(folder: Path, run_id: str) -> bool:
    """Whether metrics.jsonl is the run's and not that of another in the same folder; without a line it is nobody's."""
    lines = [line for _, line in read_lines(folder / METRICS) if line is not None]
    return not lines or next((line.get("run_id") for line in lines if line.get("kind") == "run"), None) == run_id


def lines_of_older_version(*, has_open_window: bool) -> dict[str, int]:
    """Return how many lines of its step a checkpoint counts on that was saved by a version which did not count them.

    Args:
        has_open_window: whether the step's train line was still to be written.
    """
    return {"run": 1, "train": int(not has_open_window), "eval": 10**6}


def go_back(folder: Path, step: int, lines_at_step: dict[str, int], *, train_lines: int | None) -> None:
    """Cut the records to what they held when a checkpoint was saved: the steps after it are made again.

    They may have been written in part by other starts, into other folders, so that the step decides and not a size.

    Args:
        step: the checkpoint's.
        lines_at_step: how many lines of each kind of this very step had been written by then, samples among them.
        train_lines: how many steps' lines the run had written in all.

    Raises:
        ConfigError: a record cannot be written.
    """
    kept = _cut(folder / METRICS, step, lines_at_step)
    held = sum(line.get("kind") == "train" for line in kept)
    if train_lines is not None and held < train_lines:
        log.warning(
            "warning: %s: holds %d of the %d lines that were written up to step %d; the others were moved or deleted, "
            "or lie in another folder.",
            folder / METRICS,
            held,
            train_lines,
            step,
        )
    for record in (BATCHES, REWARDS):
        _cut(folder / record, step, {"": 1})
    _cut(folder / SAMPLES, step, {"": lines_at_step.get(SAMPLE, 0)})


def _cut(record: Path, step: int, at_step: dict[str, int]) -> list[Line]:
    """Keep the lines before a step, and this many of each kind of that step; return them."""
    lines, seen, kept = read_lines(record), Counter[str](), []
    for raw, line in lines:
        if line is None or line["step"] > step:
            continue
        kind = str(line.get("kind", ""))
        seen[kind] += line["step"] == step
        if line["step"] < step or seen[kind] <= at_step.get(kind, 0):
            kept.append((raw, line))
    broken = [number for number, (raw, line) in enumerate(lines, 1) if line is None and raw.endswith(b"\n")]
    try:
        _write_kept(record, [raw for raw, _ in lines], [raw for raw, _ in kept], broken)
    except OSError as error:
        raise ConfigError(
            f"{record}: must be cut back to step {step}; got {error.strerror}. Free some space, or move it away."
        ) from error
    return [line for _, line in kept]


def _write_kept(record: Path, lines: list[bytes], kept: list[bytes], broken: list[int]) -> None:
    whole = [raw.rstrip(b"\n") + b"\n" for raw in kept]
    if whole == lines:
        return
    if not broken and whole == lines[: len(kept)]:
        os.truncate(record, sum(map(len, kept)))  # needs no space
        return
    part = record.with_name(f"{record.name}.part")
    part.write_bytes(b"".join(whole))
    if broken:
        aside = record.rename(numbered(record))
        numbers = ", ".join(map(str, broken[:5]))
        log.warning(
            "warning: %s: must hold a JSON object a line; line %s is none. It is kept as %s, and the other lines are "
            "kept.",
            record,
            numbers,
            aside.name,
        )
    os.replace(part, record)


def set_aside(folder: Path) -> None:
    """Number an earlier run's records, so that a new run in the same folder neither mixes with them nor loses them."""
    for name in (METRICS, BATCHES, REWARDS, SAMPLES, "tokens.jsonl", "tensorboard"):
        record = folder / name
        if record.exists():
            kept = record.rename(numbered(record))
            log.info("%s: an earlier run's records are kept as %s", folder, kept.name)
