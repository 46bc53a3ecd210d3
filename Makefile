# Everything goes into .venv; nothing outside this folder is changed but Debian packages that `make system` installs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Real preference data and a tokenizer, as tests/benchmarks/training.py wants them.
BENCH_DATA ?= ../shared/data
export PEDIGREE_HOME ?= $(CURDIR)/.pedigree

.PHONY: install demo ui test check bench clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip --constraint constraints.txt
	$(BIN)/pip install --quiet torch --constraint constraints.txt
	$(BIN)/pip install --quiet --editable '.[dev]' --constraint constraints.txt
	@touch $@

demo: install
	$(BIN)/python workflows/defs/demo/make.py
	$(BIN)/pedigree run demo

ui: install
	$(BIN)/pedigree ui

test: install
	$(BIN)/python -m pytest

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: install
	$(BIN)/pip install --quiet --editable '.[dev,bench]' --constraint constraints.txt
	$(BIN)/python -m tests.benchmarks.training $(BENCH_DATA)

clean:
	rm -rf $(VENV) .pedigree
