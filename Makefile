# `make demo` and `make test` need nothing but Python 3.10 to 3.13 with pip; each sets up .venv by itself.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.set-up
# Test processes on a machine of two cores; `make test WORKERS=8` where there are more.
WORKERS ?= 3
# Where Python is told to keep no byte code, each process of the tests would compile all of them again.
unexport PYTHONDONTWRITEBYTECODE
PYTEST := $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal

.PHONY: demo test test-slow test-slurm lint docs setup clean

setup: $(STAMP)

$(STAMP): requirements.txt setup.py pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -r requirements.txt
	$(BIN)/python -m pip install --quiet --no-deps -e .
	touch $(STAMP)

demo: setup
	$(BIN)/python examples/demo.py

test: setup
	$(PYTEST) -m "not slow and not slurm"

# What takes minutes: the demo from end to end, large fuzzing, long runs.
test-slow: setup
	$(PYTEST) -m slow

# The SLURM scripts on a real SLURM of two nodes on this machine; installs Debian's packages where root may.
test-slurm: setup
	tests/slurm/install.sh
	$(BIN)/python -m pytest -m slurm -rs tests/slurm

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The documentation as a site, in site/: a broken link or anchor is an error. Three seconds, no network.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

clean:
	rm -rf $(VENV) demo build site *.egg-info
