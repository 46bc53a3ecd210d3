# Everything goes into this folder: the environment into .venv, what runs make into .pedigree.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Real preference data and a tokenizer, as docs/benchmarks.md says.
BENCH_DATA ?= ../shared/data
export PEDIGREE_HOME ?= $(CURDIR)/.pedigree

.PHONY: install demo ui test test-fast test-system test-long faults check docs bench clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet torch --constraint constraints.txt
	$(BIN)/pip install --quiet --editable '.[dev]' --constraint constraints.txt
	@touch $@

demo: install
	$(BIN)/python workflows/defs/demo/make.py
	$(BIN)/pedigree run demo
	$(BIN)/python -m workflows.defs.demo.score
	@echo "Look at it: type 'make ui', then open the addresses that it prints"

ui: install
	$(BIN)/pedigree ui

# One worker more than cores, up to four, because tests also wait. A file stays with one worker, so it is set up once. Long files first.
test: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $$(($$(nproc) + 1)) --maxprocesses 4 --dist loadfile --no-loadscope-reorder -m 'not system and not long'

# All of `make test` but the tests marked slow; tests/conftest.py marks most of them by their fixtures.
test-fast: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n logical --maxprocesses 4 --dist worksteal -m 'not slow and not system and not long'

# What this needs beside Python and make is installed if that can be done, else named.
test-system: install
	PYTHON=$(BIN)/python .ci/packages
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n logical --maxprocesses 4 --dist loadgroup -m system

# More of the same faults. They take too long for every change: run them before a release.
test-long: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n logical --maxprocesses 4 -m long

# Make every fault again, and write docs/reference/faults.md from what happened.
faults: install
	rm -f .faults.jsonl
	FAULTS_FILE=$(CURDIR)/.faults.jsonl OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n logical --maxprocesses 4 -m long tests/faults
	$(BIN)/python -m tests.faults.page .faults.jsonl

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.prose

# A warning, such as a link without a target, fails the build. It needs no network.
docs: install
	$(BIN)/python -m sphinx -W --keep-going -n -q docs docs/_build/html
	@echo "Open docs/_build/html/index.html"

bench: install
	$(BIN)/pip install --quiet --editable '.[dev,bench]' --constraint constraints.txt
	$(BIN)/python -m pytest -q -s benchmarks/hashing.py benchmarks/memo_lookup.py
	$(BIN)/python -m benchmarks.commands
	$(BIN)/python -m benchmarks.profile $(BENCH_DATA)
	$(BIN)/python -m benchmarks.growth
	$(BIN)/python -m benchmarks.gate.simulation
	$(BIN)/python -m benchmarks.gate.boosting_attack
	$(BIN)/python -m benchmarks.gate.arrival_cost $(BENCH_DATA)
	$(BIN)/python -m benchmarks.short_prompts $(BENCH_DATA)
	$(BIN)/python -m benchmarks.preparation $(BENCH_DATA)
	$(BIN)/python -m benchmarks.training $(BENCH_DATA)

clean:
	rm -rf $(VENV) .pedigree docs/_build
