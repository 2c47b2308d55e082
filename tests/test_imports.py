"""Imports run one way, room by room and module by module; heavy packages have one door."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "openkto").rglob("*.py"))
# What a part may import of the library, beside itself and the errors.
ALLOWED = {
    "errors": set(),
    "process": set(),
    "files": {"process"},
    "config": {"files", "process"},
    "batches": {"config"},
    "data": {"batches", "config", "files", "process"},
    "models": {"config", "files", "process"},
    "distributed": {"config", "files", "process"},
    "report": {"batches", "config", "distributed", "files", "models"},
    "trainer": {"batches", "config", "data", "distributed", "files", "models", "process", "report"},
    "pages": {"config", "data", "files", "report"},
    "commands": {
        "batches",
        "config",
        "data",
        "distributed",
        "files",
        "models",
        "pages",
        "process",
        "report",
        "trainer",
    },
}
DOORS = {
    "deepspeed": {"distributed"},
    "peft": {"models"},
    "wandb": {"report"},
    "yaml": {"config"},
    "vl_convert": {"pages"},
}


def part_of(module: str) -> str:
    name = module.split(".")[1]
    return "commands" if name == "__main__" else name


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_run_one_way(path):
    part = part_of(".".join(path.relative_to(ROOT).with_suffix("").parts))
    for name in imported(path):
        if name.startswith("openkto."):
            target = part_of(name)
            assert target in ALLOWED.get(part, set()) | {part, "errors"}, f"{part} imports {name}"
        top = name.split(".")[0]
        assert part in DOORS.get(top, {part}), f"{part} imports {name}"


@pytest.mark.parametrize("command", ["train", "evaluate", "report", "merge_lora"])
def test_help_and_wrong_flags_need_no_heavy_package(command):
    code = (
        "import sys; from openkto.__main__ import dispatch\n"
        "for words in (['--help'], ['--no_such_flag']):\n"
        "    try: dispatch([sys.argv[1], *words])\n"
        "    except BaseException as error: print(type(error).__name__)\n"
        "print(sorted({'torch', 'deepspeed', 'transformers', 'datasets', 'peft'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code, command], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-3:] == ["SystemExit", "ConfigError", "[]"]
