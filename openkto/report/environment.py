"""Where a run ran: versions, hardware and the code's commit, so that its numbers can be traced."""

import functools
import importlib.metadata
import platform
import subprocess
from pathlib import Path

import torch

import openkto

PACKAGES = ("torch", "deepspeed", "transformers", "tokenizers", "datasets", "peft", "flash-attn")


def environment(world_size: int, device: torch.device) -> dict[str, str | int]:
    """Return what the `run` line of metrics.jsonl holds."""
    values: dict[str, str | int] = {**versions(), "python": platform.python_version()}
    values["world_size"] = world_size
    values["device"] = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    values["threads"] = torch.get_num_threads()
    commit = _git_commit()
    if commit:
        values["git_commit"] = commit
    return values


def versions() -> dict[str, str]:
    """Return the versions of what a run's numbers come from; a package that is not installed is left out."""
    values = {"openkto": openkto.__version__}
    for package in PACKAGES:
        try:
            values[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return values


@functools.cache
def _git_commit() -> str:
    """Return the commit of the checkout that this code runs from, or nothing outside one."""
    try:
        answer = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout.strip() if answer.returncode == 0 else ""
