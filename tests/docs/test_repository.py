"""What CHANGELOG.md, CITATION.cff and SECURITY.md state of the project."""

import dataclasses
import re

import pytest
import yaml

import openkto
from openkto.__main__ import COMMANDS
from openkto.config import settings
from openkto.config.run_options import RunOptions
from tests.docs.snippets import ROOT


def test_the_citation_has_the_projects_name_version_and_licence():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(citation)  # what the format requires
    assert citation["cff-version"] == "1.2.0"
    assert citation["version"] == openkto.__version__
    assert f'license="{citation["license"]}"' in (ROOT / "setup.py").read_text()
    assert "arXiv:2402.01306" in (ROOT / "README.md").read_text()
    assert citation["references"][0]["url"].endswith("2402.01306")


def test_the_changelog_has_the_version_and_only_the_forms_kinds_of_change():
    changelog = (ROOT / "CHANGELOG.md").read_text()
    headings = re.findall(r"^## \[(.+?)\]", changelog, re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert openkto.__version__ in changelog
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert set(re.findall(r"^### (.+)$", changelog, re.MULTILINE)) <= kinds


@pytest.mark.parametrize("page", ["CHANGELOG.md", "SECURITY.md"])
def test_every_flag_and_command_is_known(page):
    text = (ROOT / page).read_text()
    flags = set(re.findall(r"`[^`]*?--(\w+)", text))
    assert flags
    assert flags <= {*settings(), *(item.name for item in dataclasses.fields(RunOptions))}
    assert set(re.findall(r"`openkto\s+(\w+)", text)) <= set(COMMANDS)
