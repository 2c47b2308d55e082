"""The fenced blocks of README.md and docs/: commands, Python, and the files that they read.

A block runs in the tests unless its first line says `# Not run by the tests: ...`, which readers see too. A block with
a title is a file of that name, which the page's later blocks find. tests/docs/test_snippets.py runs a page's blocks in
order.
"""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PAGES = ("README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))
FENCE = re.compile(r'^( *)```(\w*)(?: title="([^"]+)")?\n(.*?)^\1```$', re.MULTILINE | re.DOTALL)
NOT_RUN = "# Not run by the tests: "
LAUNCHERS = ("deepspeed", "torchrun")


@dataclass(frozen=True)
class Snippet:
    """A fenced block.

    Args:
        title: the file that it is, or "".
    """

    page: str
    line: int
    language: str
    title: str
    code: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def is_run(self) -> bool:
        return not self.code.startswith(NOT_RUN)


def snippets(page: str) -> list[Snippet]:
    """Return a page's fenced blocks, in order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [
        Snippet(page, 1 + text.count("\n", 0, found.start()), found[2], found[3] or "", found[4])
        for found in FENCE.finditer(text)
    ]


def commands(snippet: Snippet) -> list[list[str]]:
    """Return the words of each command of a block of shell lines, without comments."""
    lines = snippet.code.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def command_of(words: list[str]) -> tuple[str, list[str]] | None:
    """Return the openkto command and its flags that a command line runs, whatever launches it."""
    scripts = {"cli/train_kto.py": "train", "cli/evaluate_kto.py": "evaluate", "cli/inspect_data.py": "inspect"}
    for i, word in enumerate(words):
        if word in scripts:
            return scripts[word], words[i + 1 :]
        if word.startswith("cli/") and word.endswith(".py"):
            return Path(word).stem, words[i + 1 :]
        if word == "openkto" and i + 1 < len(words):
            return words[i + 1], words[i + 2 :]
    return None
