"""The job scripts and the commands of docs/cluster.md, without a SLURM."""

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from openkto.config.flags import parse

ROOT = Path(__file__).parent.parent.parent
PLAIN, CONTAINER = (ROOT / "configs/slurm" / name for name in ("train_kto.sbatch", "train_kto_container.sbatch"))
# What the flags of `openkto train` come after.
STARTS = ("train", "cli/train_kto.py", "configs/slurm/train_kto.sbatch")


def commands_in(page):
    """Return the words of each command that trains in a page's shell blocks."""
    blocks = re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL)
    lines = [line.rstrip(" &") for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [words for words in map(shlex.split, lines) if set(STARTS) & set(words)]


@pytest.mark.parametrize("words", commands_in(ROOT / "docs/cluster.md"), ids=" ".join)
def test_the_cluster_pages_commands_are_understood(words, monkeypatch):
    monkeypatch.chdir(ROOT)
    flags = words[1 + max(words.index(word) for word in STARTS if word in words) :]
    if flags[-1] == "$@":
        flags = [*flags[:-1], "--config", "configs/8b_full_8x40gb.yaml"]
    # A cluster's own settings file is not here; a ready run stands for it.
    flags = ["configs/8b_full_8x40gb.yaml" if flag == "/shared/run.yaml" else flag for flag in flags]
    config, _ = parse(flags, "train")
    assert config.data.dataset


def settings(script):
    """Return the options for sbatch, without the comments after them."""
    return [line.partition("     ")[0].rstrip() for line in script.read_text().splitlines() if "#SBATCH" in line]


def commands(script):
    """Return what the script runs."""
    return [line for line in script.read_text().splitlines() if line and not line.startswith("#")]


def test_the_container_script_is_the_plain_one_but_for_the_container():
    assert settings(CONTAINER) == settings(PLAIN)
    container = [line for line in commands(CONTAINER) if not line.startswith(("IMAGE=", "MOUNTS="))]
    at = container.index("srun --kill-on-bad-exit=0 --wait=60 \\")
    assert "--container-image" in container[at + 1]
    container[at : at + 3] = [container[at].replace("\\", container[at + 2].strip())]
    assert container == commands(PLAIN)


@pytest.mark.parametrize("script", [PLAIN, CONTAINER], ids=lambda path: path.stem)
def test_sbatch_reads_every_option_of_a_script(script):
    # It stops at the first line that is neither empty nor a comment.
    text = script.read_text()
    assert "#SBATCH" not in text[text.index(commands(script)[0]) :]
    subprocess.run(["bash", "-n", str(script)], check=True)


@pytest.mark.parametrize(
    ("statuses", "requeued"),
    [([75, 75, 0], 2), ([76, 76], 1), ([76, 75, 76, 0], 3), ([1], 0)],
    ids=lambda value: str(value).replace(" ", ""),
)
def test_a_job_comes_back_after_a_stop_but_not_after_two_starts_without_a_step(tmp_path, statuses, requeued):
    for name, does in (("srun", "exit $STATUS"), ("scontrol", "echo $1 >> said"), ("hostnames", "")):
        (tmp_path / name).write_text(f"#!/bin/bash\n{does}\n")
        (tmp_path / name).chmod(0o755)
    environ = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n"}
    for status in statuses:
        done = subprocess.run(["bash", str(PLAIN)], cwd=tmp_path, env=environ | {"STATUS": str(status)}, check=False)
        assert done.returncode == status
    said = (tmp_path / "said").read_text().split()
    assert said.count("requeue") == requeued
    assert not list(tmp_path.glob("*.idle"))


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_finds_nothing():
    subprocess.run(["shellcheck", PLAIN, CONTAINER, *Path(__file__).parent.glob("*.sh")], check=True)
