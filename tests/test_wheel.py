"""The wheel that `python -m build` makes is whole: installed elsewhere, it trains without the checkout."""

import os
import shutil
import site
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from tests.text_rows import write_model, write_rows

ROOT = Path(__file__).parent.parent


def run(*command: object, cwd: Path) -> str:
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PIP_FIND_LINKS")}
    environment = clean | {"OPENKTO_CACHE": str(cwd / "cache"), "OMP_NUM_THREADS": "1"}
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build in a copy of what is committed, since setuptools leaves folders beside its sources."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("openkto", "configs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    # A source archive first and the wheel from it, as for an upload: what the archive lacks, the wheel lacks too.
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, source, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_holds_every_file_of_the_package_and_the_ready_runs(wheel):
    held = zipfile.ZipFile(wheel).namelist()
    files = [path for path in (ROOT / "openkto").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert {str(path.relative_to(ROOT)) for path in files} <= set(held)
    assert "openkto/py.typed" in held
    runs = [path for path in (ROOT / "configs").rglob("*") if path.is_file()]
    shared = [name.partition("/share/openkto/")[2] for name in held]
    assert {str(path.relative_to(ROOT)) for path in runs} <= set(shared)


def test_the_installed_wheel_trains_from_another_folder(wheel, tmp_path):
    place = tmp_path / "env"
    venv.create(place, with_pip=False)
    python = place / "bin/python"
    libraries = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip())
    # What the tests run with, without this checkout: a path in a .pth file is added, and no .pth file in it is read.
    (libraries / "others.pth").write_text("".join(f"{folder}\n" for folder in library_folders()))
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", wheel, cwd=tmp_path)
    away = tmp_path / "away"
    away.mkdir()
    write_model(away / "model")
    write_rows(away / "rows.jsonl", 12)
    words = ["--config", place / "share/openkto/configs/cpu_try_out.yaml", "--max_steps", 1, "--save_path", "out"]
    words += ["--pretrain", "model", "--dataset", "rows.jsonl", "--max_len", 128]
    said = run(place / "bin/openkto", "train", *words, cwd=away)
    assert "the model is in out" in said  # and not by this checkout: no path leads there
    assert (away / "out/model.safetensors").is_file()


def library_folders() -> list[str]:
    """Return the folders that hold torch and the others, of this interpreter and of one that it sees by a .pth file."""
    own = site.getsitepackages()
    return own + [folder for folder in sys.path if folder.endswith("site-packages") and folder not in own]
