"""What a run left, read back and compared: the lines of its records, and its weights."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import safetensors.torch
import torch

# What differs from one run to the next without any reason to care.
TIMES = {"samples_per_second", "tokens_per_second", "step_time_s", "peak_memory_gb", "seconds"}
# The metrics of a step by which two ways to compute it are compared.
METRICS = {"loss", "kl", "kl_unclamped", "grad_norm", "num_tokens"}
METRICS |= {"rewards/chosen", "rewards/rejected", "logps/chosen"}


def lines(folder: Path, kind: str = "train") -> list[dict]:
    """Return the lines of metrics.jsonl that are of a kind."""
    return [line for line in _read(folder / "metrics.jsonl") if line["kind"] == kind]


def records(folder: Path) -> list[dict]:
    """Return the lines of metrics.jsonl without times, and without those that each start writes."""
    lines = _read(folder / "metrics.jsonl")
    return [{k: v for k, v in line.items() if k not in TIMES} for line in lines if line["kind"] != "run"]


def numbers(line: dict) -> dict:
    """Return what of a line does not depend on the machine's speed."""
    return {name: value for name, value in line.items() if name not in TIMES and name != "kind"}


def batches(folder: Path) -> list[dict]:
    """Return which rows each step had, and whose completions its mismatched pairs."""
    return _read(folder / "batches.jsonl")


def _read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def weights(folder: Path, name: str = "model.safetensors") -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(folder / name)


def worst(a: dict, b: dict) -> float:
    """Return the largest difference between the weights of two models of the same names."""
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def same(a: dict, b: dict) -> bool:
    """Return whether two models have the same weights in the same precision, to the last bit."""
    return a.keys() == b.keys() and all(a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a)


def assert_same_lines(expected: list[dict], got: list[dict], metrics: Iterable[str] = METRICS) -> None:
    """Compare the metrics of two ways to compute the same steps."""
    assert len(expected) == len(got) > 0
    for line, other in zip(expected, got, strict=True):
        assert line.keys() == other.keys()
        for name in set(metrics) & line.keys():
            assert other[name] == pytest.approx(line[name], rel=1e-5, abs=2e-5), name


def assert_same_metrics(expected: Path, got: Path) -> None:
    """Compare the steps and evaluations that two runs wrote down."""
    for kind in ("train", "eval"):
        assert_same_lines(lines(expected, kind), lines(got, kind))


def assert_close(expected: dict, got: dict, atol: float = 1e-5) -> None:
    """Compare the weights of two ways to compute the same model, by name."""
    assert expected.keys() == got.keys()
    for name, value in expected.items():
        torch.testing.assert_close(got[name].to(value.dtype), value, rtol=0, atol=atol, msg=_named(name))


def _named(name: str) -> Callable[[str], str]:
    return lambda text: f"{name}: {text}"
