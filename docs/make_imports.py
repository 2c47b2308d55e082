"""Prints the picture of which part of the library imports which.

`python docs/make_imports.py > docs/images/imports.svg` writes it again.
"""

import ast
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Where a part stands from left to right; how high is computed from the code.
COLUMN = {
    "commands": 2.0,
    "pages": 1.0,
    "planning": 2.0,
    "trainer": 3.0,
    "inspection": 1.0,
    "data": 1.0,
    "report": 2.6,
    "batches": 0.2,
    "models": 2.4,
    "distributed": 3.4,
    "config": 1.4,
    "files": 2.2,
    "process": 2.0,
    "errors": 1.2,
    "masking": 1.2,
}
WIDTH, HEIGHT = 210, 76  # of a column and of a row, in pixels
BOX_WIDTH, BOX_HEIGHT = 130, 36

Graph = dict[str, set[str]]


def modules() -> dict[str, Path]:
    """Return the library's modules by name."""
    files = sorted((ROOT / "openkto").rglob("*.py"))
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in files}


def imported_modules(path: Path, known: Iterable[str]) -> set[str]:
    """Return the library's modules that one imports, in functions too; for types only does not count."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    types = [node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    left_out = {inner for node in types for inner in ast.walk(node)}
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node not in left_out:
            names |= {f"{node.module}.{alias.name}" for alias in node.names} & set(known) or {node.module}
    return names & set(known)


def part_of(module: str) -> str:
    """Return the part of the library that a module belongs to."""
    name = module.split(".")[1]
    return "commands" if name == "__main__" else name


def imports_of_parts() -> Graph:
    """Return which other parts each part of the library imports."""
    graph: Graph = {}
    known = {name: path for name, path in modules().items() if name != "openkto"}
    for name, path in known.items():
        part = part_of(name)
        graph.setdefault(part, set()).update({part_of(other) for other in imported_modules(path, known)} - {part})
    return graph


def rows(graph: Graph) -> dict[str, int]:
    """Return each part's row, from 0 at the top: one below the lowest part that imports it."""
    row: dict[str, int] = {}
    while len(row) < len(graph):
        free = [name for name in graph if name not in row and all(p in row for p in graph if name in graph[p])]
        assert free, f"these parts import each other in a circle: {sorted(graph.keys() - row.keys())}"
        row |= {name: max((row[p] + 1 for p in graph if name in graph[p]), default=0) for name in free}
    return row


def reached(graph: Graph, start: str) -> set[str]:
    """Return all that a part imports, through other parts too."""
    return graph[start].union(*(reached(graph, name) for name in graph[start]))


def picture() -> str:
    """Return the picture; what a part imports through another part is left out."""
    graph = imports_of_parts()
    row = rows(graph)
    middle = {name: (int(WIDTH * (COLUMN[name] + 0.25)), HEIGHT * row[name] + BOX_HEIGHT) for name in sorted(graph)}
    width, height = int(WIDTH * (max(COLUMN.values()) + 0.6)), HEIGHT * max(row.values()) + 2 * BOX_HEIGHT
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="15" role="img">',
        "  <title>Which part of OpenKTO imports which: every arrow leads down</title>",
        '  <defs><marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#57606a"/></marker></defs>',
        f'  <rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for name, others in sorted(graph.items()):
        for other in sorted(others - set().union(*(reached(graph, one) for one in others))):
            (x, y), (to_x, to_y) = middle[name], middle[other]
            lines.append(
                f'  <line x1="{x}" y1="{y}" x2="{to_x}" y2="{to_y - BOX_HEIGHT // 2}" stroke="#57606a" '
                'marker-end="url(#head)"/>'
            )
    for name, (x, y) in middle.items():
        lines.append(
            f'  <rect x="{x - BOX_WIDTH // 2}" y="{y - BOX_HEIGHT // 2}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" '
            f'rx="6" fill="#ddf4ff" stroke="#0969da"/><text x="{x}" y="{y + 5}" text-anchor="middle">{name}</text>'
        )
    return "\n".join([*lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    sys.stdout.write(picture())
