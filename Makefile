# Every target does its own set-up in .venv and needs only python3 and make.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
DEV    := $(VENV)/.installed-dev

.PHONY: demo test test-slow test-all fuzz check bench clean help
help:
	@echo "make demo   tune and compare a real training job (about ten minutes)"
	@echo "make test   the test suite (some 10 minutes on two cores)"
	@echo "make fuzz   hostile command lines and documents, ten times as many as the tests try"
	@echo "make test-slow, make test-all   the slow tests of the day; all tests, for hours"
	@echo "make check  formatting, lint, types, and the pages in docs/ (build/site/)"
	@echo "make bench  the benchmarks, hours of them; results as JSON in runs/benchmarks/<device>/"
	@echo "make clean  remove .venv, caches and builds (runs/ is kept)"

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(STAMP): pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

$(DEV): pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	@# Its build asks for torch, which a build of its own does not see.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation "deepspeed>=0.19"
	@touch $@ $(STAMP)

demo: $(STAMP)
	$(BIN)/autotune demo

test: $(DEV)
	$(BIN)/python -m pytest -q -n 2 --dist worksteal -m "not slow"

test-slow: $(DEV)
	$(BIN)/python -m pytest -q -n 2 --dist worksteal -m slow

test-all: $(DEV)
	SLOW_ALL=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal

fuzz: $(DEV)
	SLOW_ALL=1 FUZZ_EFFORT=1 $(BIN)/python -m pytest -q -n 2 tests/fuzz

check: $(DEV)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

bench: $(STAMP)
	$(BIN)/autotune bench all

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
