"""Every command and Python snippet of README.md and docs/ runs here, page by page, or says that it does not."""

import os
import re
import shutil
from pathlib import Path

import pytest
import yaml

from openkto.__main__ import dispatch
from openkto.config.flags import parse
from tests.docs.snippets import LAUNCHERS, PAGES, ROOT, Snippet, command_of, commands, snippets
from tests.ranks import run_ranks
from tests.text_rows import write_model, write_rows

# Snippets that a test of their own runs, with what they need.
RUN_ELSEWHERE = {
    "docs/library.md": "tests/test_docs.py",
    "docs/models.md": "tests/models/test_text_of_a_whole.py",
}
MARKED = [snippet for page in PAGES for snippet in snippets(page) if not snippet.is_run]
RUNNING_PAGES = [
    page
    for page in PAGES
    if page not in RUN_ELSEWHERE and any(s.language in ("bash", "python") and s.is_run for s in snippets(page))
]


def write_place(folder: Path) -> None:
    """Make what the pages' commands speak of: a model, rows, held-out rows and the repository's own folders."""
    write_model(folder / "path/or/name")
    write_rows(folder / "rows.jsonl", 40)
    write_rows(folder / "held_out.jsonl", 12)
    # The name on the Hub that the first pages give is a folder here, so it is not downloaded.
    (folder / "HuggingFaceTB").mkdir()
    (folder / "HuggingFaceTB/SmolLM2-135M-Instruct").symlink_to(folder / "path/or/name")
    for name in ("configs", "examples"):
        (folder / name).symlink_to(ROOT / name)


def run_page(folder: Path, page: str) -> None:
    """Run a page's blocks in order; what fails names its place."""
    os.chdir(folder)
    os.environ["OPENKTO_CACHE"] = str(folder / "cache")
    blocks = snippets(page)
    first = next((block.code for block in blocks if re.search(r"\bout\b", block.code)), "--save_path out")
    if "--save_path out" not in first:
        for name in ("out", "other_out"):
            dispatch(["train", "--pretrain", "path/or/name", "--dataset", "rows.jsonl", "--save_path", name])
    for block in blocks:
        if block.title:
            Path(block.title).write_text(block.code)
        elif block.is_run:
            run_block(block)


def run_block(block: Snippet) -> None:
    try:
        if block.language == "python":
            exec(compile(block.code, block.place, "exec"), {"__name__": "__main__"})
        for words in commands(block) if block.language == "bash" else []:
            run_command(words)
    except BaseException as error:
        raise AssertionError(f"{block.place}: {error}\n{block.code}") from error


def run_command(words: list[str]) -> None:
    if words[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert set(words[1:]) <= set(targets), f"the Makefile has no such target: {words}"
        return
    assert words[0] == "openkto", f"the tests know of no way to run {words[0]}: mark the block, or teach them"
    dispatch(words[1 : words.index(">") if ">" in words else None])


def run_pages(folder: Path, pages: list[str]) -> None:
    for page in pages:
        place = folder / Path(page).stem
        write_place(place)
        run_page(place, page)


def has_plots(page: str) -> bool:
    return any(re.search("openkto (report|inspect)", block.code) for block in snippets(page) if block.is_run)


# Those that draw plots run in one process, where the plots' script, seconds of work, is made once.
PLOTTED = [page for page in RUNNING_PAGES if has_plots(page)]
GROUPS = [PLOTTED, *([page] for page in RUNNING_PAGES if page not in PLOTTED)]


@pytest.mark.parametrize("pages", GROUPS, ids=" ".join)
def test_what_a_page_shows_runs_in_its_order(pages, tmp_path):
    run_ranks(run_pages, 1, tmp_path, tmp_path, pages)


def here(words: list[str]) -> list[str]:
    """Return the flags with this folder's settings for those of a cluster's shared disk or of a script's caller."""
    stand_ins = {"/shared/run.yaml": ["out/run.yaml"], "$@": ["--config", "out/run.yaml"], "&": []}
    return [word for given in words for word in stand_ins.get(given, [given])]


# Packages that a command on a page asks for: here it is only read whether the flags are right.
NOT_INSTALLED = ("mlflow", "trackio")


@pytest.mark.parametrize("snippet", MARKED, ids=lambda snippet: snippet.place)
def test_what_does_not_run_here_has_flags_that_exist(snippet, tmp_path, monkeypatch):
    assert re.match(r"# Not run by the tests: needs .+\.$", snippet.code.splitlines()[0])
    write_place(tmp_path)
    shutil.copytree(tmp_path / "path/or/name", tmp_path / "out")
    (tmp_path / "out/run.yaml").write_text("pretrain: path/or/name\ndataset: [rows.jsonl]\n")
    monkeypatch.chdir(tmp_path)
    for package in NOT_INSTALLED:
        (tmp_path / "packages" / package).mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path / "packages")
    for words in commands(snippet) if snippet.language == "bash" else []:
        found = command_of(words)
        if found is None:
            assert words[0] not in LAUNCHERS
        elif found[0] in ("train", "evaluate", "precompute_reference"):
            parse(here(found[1]), found[0])


@pytest.mark.parametrize("page", PAGES)
def test_yaml_on_a_page_is_yaml(page):
    for snippet in snippets(page):
        if snippet.language == "yaml":
            assert snippet.code.startswith("#") or yaml.safe_load(snippet.code), snippet.place


def test_snippets_that_run_elsewhere_are_read_there():
    for page, test in RUN_ELSEWHERE.items():
        assert Path(page).name in (ROOT / test).read_text()


@pytest.mark.parametrize("page", PAGES)
def test_a_block_says_what_it_is(page):
    """So that no command hides in a block that the tests take for text."""
    for snippet in snippets(page):
        assert snippet.language, f"{snippet.place}: name the block's language, or text"
        if snippet.language not in ("bash", "python", "dockerfile"):
            assert not re.search(r"^\$? ?(openkto|python|deepspeed|torchrun) ", snippet.code, re.MULTILINE), (
                snippet.place
            )
