"""What `mkdocs build` does beside rendering docs/: the flags from the code, and the pages that live outside docs/.

A page is written for GitHub, where links are paths of the repository. Each file outside docs/ that a page links to
becomes part of the site under its own path (README.md as index.md), and the links follow.
"""

import posixpath
import re
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

import make_flags  # noqa: E402

LINK = re.compile(r"(\]\()([^)\s#]+)")


def linked(page: str) -> set[str]:
    """Return the files of the repository that a page, named by its path there, links to."""
    targets = LINK.findall((ROOT / page).read_text(encoding="utf-8"))
    return {path for _, target in targets if (ROOT / (path := in_repository(page, target))).is_file()}


def in_repository(page: str, target: str) -> str:
    """Return the path in the repository of a page's link; a web address becomes no file's path."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), target))


def in_site(path: str) -> str:
    """Return where a file of the repository is in the site."""
    return "index.md" if path == "README.md" else path.removeprefix("docs/")


def in_repository_of(page: str) -> str:
    """Return the path in the repository of a page of the site."""
    if page == "index.md":
        return "README.md"
    return f"docs/{page}" if (ROOT / "docs" / page).is_file() else page


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Take in README.md, and what pages link to outside docs/."""
    waiting = {"README.md"} | {f"docs/{file.src_uri}" for file in files.documentation_pages()}
    seen: set[str] = set()
    while waiting:
        path = waiting.pop()
        seen.add(path)
        if not path.startswith("docs/"):
            # Such a page need not be in the navigation.
            level = InclusionLevel.NOT_IN_NAV
            files.append(File.generated(config, in_site(path), abs_src_path=str(ROOT / path), inclusion=level))
        if path.endswith(".md"):
            waiting |= linked(path) - seen
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Write the page of flags, and let links lead to where the site has their files."""
    place = page.file.src_uri
    if place == "flags.md":
        markdown = make_flags.page()
    source, folder = in_repository_of(place), posixpath.dirname(place) or "."

    def moved(found: re.Match[str]) -> str:
        path = in_repository(source, found[2])
        return found[1] + (posixpath.relpath(in_site(path), folder) if (ROOT / path).is_file() else found[2])

    return LINK.sub(moved, markdown)
