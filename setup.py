"""Packaging: ranges of what OpenKTO runs with; requirements.txt pins what CI runs."""

import re
from pathlib import Path

from setuptools import find_namespace_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (HERE / "openkto/__init__.py").read_text(encoding="utf-8")).group(1)
CONFIGS = ("configs", "configs/slurm")


def files_in(folder: str) -> list[str]:
    """Return the files of a folder beside this one, as paths from here."""
    return sorted(str(path.relative_to(HERE)) for path in (HERE / folder).iterdir() if path.is_file())


setup(
    name="openkto",
    version=VERSION,
    description="Kahneman-Tversky Optimization (KTO) from thumbs-up / thumbs-down rows, on DeepSpeed",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_namespace_packages(include=["openkto", "openkto.*"]),
    package_data={"openkto": ["py.typed"], "openkto.pages": ["*.html.jinja", "page.js"]},
    # The recipes: <environment>/share/openkto/configs once installed.
    data_files=[(f"share/openkto/{folder}", files_in(folder)) for folder in CONFIGS],
    install_requires=[
        "torch>=2.11",
        "deepspeed>=0.19.8,<0.20",
        "transformers>=5.17,<6",
        "datasets>=5.1",
        "accelerate>=1.10",
        "peft>=0.21,<0.22",
        "PyYAML>=6",
        "numpy>=1.26",
        "pyarrow>=24",
        "xxhash>=3",
        "tensorboard>=2.15",
        "tqdm>=4.66.3",
        "jinja2>=3.1",
        "vl-convert-python>=1.9",
    ],
    extras_require={
        "wandb": ["wandb>=0.19"],
        "docs": ["mkdocs>=1.6,<2", "mkdocs-material>=9.7,<10", "mkdocstrings>=1.0,<2", "mkdocstrings-python>=2.0,<3"],
        "test": [
            "pytest>=8",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.6",
            "hypothesis>=6.100",
            "wandb>=0.19",
            "build>=1.2",
            "jsonschema>=4.20",
            "ruff",
            "mypy",
        ],
    },
    entry_points={"console_scripts": ["openkto=openkto.__main__:main"]},
)
