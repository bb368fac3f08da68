# Every target sets up what it needs: a fresh machine with Python, git and make is enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup demo test lint types unit slow docs clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/heeler demo

test: lint types unit

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

# Two test processes with one thread each keep both cores of a small machine busy without fighting over them.
unit: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

# What takes too long for every change: thousands of random models, 40 architectures, every robust rule under every
# fault, 100 runs with random faults or a slow rank.
slow: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 -m slow tests --ignore tests/robust
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m slow tests/robust
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.distributed.soak --seeds 100

# With warnings as errors (--quiet would pass over them); nothing is fetched. Open build/site/index.html.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
