"""The Dockerfile without Docker: what it copies is there and is sent, and what it pins is in the ranges of setup.py."""

import ast
import re

import pytest
from packaging.requirements import Requirement

from tests.docs.snippets import ROOT

TEXT = (ROOT / "dockerfile/Dockerfile").read_text()
# Each instruction in a line, without comments.
LINES = re.sub(r"^#.*\n", "", TEXT, flags=re.MULTILINE).replace("\\\n", " ").splitlines()
INSTRUCTIONS = [line.split(maxsplit=1) for line in LINES if line.strip()]
COPIED = [
    source
    for name, rest in INSTRUCTIONS
    if name == "COPY" and not rest.startswith("--from=")
    for source in rest.split()[:-1]
]


def told(name):
    return [rest for instruction, rest in INSTRUCTIONS if instruction == name]


def test_the_builder_is_sent_what_is_copied_and_nothing_else():
    patterns = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    assert patterns[0] == "*"
    assert "**/__pycache__" in patterns
    sent = {pattern[1:] for pattern in patterns if pattern.startswith("!")}
    assert {source.split("/")[0] for source in COPIED} == sent
    assert [source for source in COPIED if not (ROOT / source).exists()] == []


def test_every_instruction_is_known_and_the_second_stage_takes_the_first_ones_environment():
    names = {"FROM", "RUN", "ENV", "WORKDIR", "COPY", "ARG", "USER", "ENTRYPOINT"}
    assert {name for name, _ in INSTRUCTIONS} == names
    (first, last) = told("FROM")
    assert first == f"{last} AS build"  # so the environment's Python is the same file in both
    assert "--from=build /opt/venv /opt/venv" in told("COPY")


def test_it_runs_without_roots_rights_and_is_tried_while_it_is_built():
    (user,) = told("USER")
    assert user.isdecimal()  # Kubernetes' runAsNonRoot reads no names
    assert int(user) > 0
    assert f"fsGroup: {user}}}" in (ROOT / "docs/cluster.md").read_text()
    assert any(run.startswith("openkto --version") for run in told("RUN"))
    assert told("ENTRYPOINT") == ['["openkto"]']


def test_what_deepspeeds_adam_is_built_with_is_in_the_second_stage():
    last = next(run for run in reversed(told("RUN")) if "apt-get" in run)
    assert {"g++", "ninja-build", "python3-dev"} <= set(last.split())


def requirements():
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def ranges():
    """Return the requirements of setup.py, those of its extras among them."""
    strings = (
        node.value for node in ast.walk(ast.parse((ROOT / "setup.py").read_text())) if type(node) is ast.Constant
    )
    words = [word for word in strings if isinstance(word, str) and re.fullmatch(r"[\w-]+>=[\d.,<]+", word)]
    return {Requirement(word).name.lower(): Requirement(word).specifier for word in words}


@pytest.mark.parametrize("pin", requirements(), ids=str)
def test_what_is_installed_is_within_the_ranges_of_setup(pin):
    (version,) = (part.version for part in pin.specifier)
    assert pin.name.lower() in {*ranges(), "ruff", "mypy"}
    assert version in ranges().get(pin.name.lower(), pin.specifier)


def test_the_image_has_the_torch_that_it_says():
    (torch,) = [pin for pin in requirements() if pin.name == "torch"]
    assert f"with torch {re.search(r'[0-9]+[.][0-9]+', str(torch.specifier))[0]})" in TEXT
