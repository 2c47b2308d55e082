"""Imports run one way, room by room and module by module; heavy packages have one door."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from docs.make_imports import imported_modules, modules, part_of, picture

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "openkto").rglob("*.py"))
# What a part may import of the library, beside itself, the errors and what leaves keys out of texts.
ALLOWED = {
    "masking": set(),
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
    "inspection": {"config", "data", "report"},
    "planning": {"batches", "distributed", "models", "report"},
    "pages": {"config", "data", "files", "inspection", "report"},
    "commands": {
        "batches",
        "config",
        "data",
        "distributed",
        "files",
        "inspection",
        "models",
        "pages",
        "planning",
        "process",
        "report",
        "trainer",
    },
}
DOORS = {
    "deepspeed": {"distributed"},
    "peft": {"models"},
    "wandb": {"report"},
    "accelerate": {"report"},
    "yaml": {"config"},
    "vl_convert": {"pages"},
}


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
            assert target in ALLOWED.get(part, set()) | {part, "errors", "masking"}, f"{part} imports {name}"
    if part == "masking":
        assert not any(name.startswith("openkto") for name in imported(path))
        top = name.split(".")[0]
        assert part in DOORS.get(top, {part}), f"{part} imports {name}"


def test_no_module_imports_itself_on_a_way_round():
    known = modules()
    left = {name: imported_modules(path, known) - {name} for name, path in known.items()}
    while ends := {name for name, others in left.items() if not others & left.keys()}:
        left = {name: others for name, others in left.items() if name not in ends}
    assert not left, f"modules that wait for each other: {sorted(left)}"


def test_the_picture_of_the_imports_is_the_codes():
    """Its arrows cannot lead up: a part stands below all that import it, and there is no such order for a circle."""
    assert picture() == (ROOT / "docs" / "images" / "imports.svg").read_text(encoding="utf-8")


def test_what_watches_a_process_needs_the_standard_library_only():
    for path in sorted((ROOT / "openkto" / "process").glob("*.py")):
        others = {name for name in imported(path) if name.split(".")[0] not in sys.stdlib_module_names}
        assert all(name.startswith(("openkto.process", "openkto.errors")) for name in others), f"{path}: {others}"


def test_the_names_that_users_import_are_there():
    from openkto.config import LoraConfig
    from openkto.data.dataset import UnpairedPreferenceDataset
    from openkto.data.loader import KTODataLoader
    from openkto.distributed.strategy import DeepspeedStrategy
    from openkto.models import Actor, load_tokenizer
    from openkto.models.loss import KTOLoss
    from openkto.trainer import FitArgs, KTOTrainer
    from openkto.trainer.schedule import create_scheduler

    named = (LoraConfig, UnpairedPreferenceDataset, KTODataLoader, DeepspeedStrategy, Actor, load_tokenizer, KTOLoss)
    assert all(callable(name) for name in (*named, FitArgs, KTOTrainer, create_scheduler))


@pytest.mark.parametrize("command", ["inspect", "plan", "train", "evaluate", "report", "merge_lora"])
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
