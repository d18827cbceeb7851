# Every target makes the virtual environment itself when it is missing or older than what it is made from.
PYTHON ?= python3
VENV   := .venv
READY  := $(VENV)/.ready
BIN    := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help setup test lint typecheck bench

help:  ## list these targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(READY)  ## make the virtual environment (.venv) with everything the other targets need

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "tapfm needs Python 3.11 or newer; try: make $(or $(MAKECMDGOALS),setup) PYTHON=python3.11"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

test: $(READY)  ## run all tests
	@# one thread each: of small encoders, threads only wait for each other
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses logical --maxprocesses 8 --dist loadfile

lint: $(READY)  ## check style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

typecheck: $(READY)  ## check types
	$(BIN)/mypy

bench: $(READY)  ## measure reading, the adaptation step and feeding it side by side on this machine
	$(BIN)/python benchmarks/reading.py
	$(BIN)/python benchmarks/adaptation_step.py
	$(BIN)/python benchmarks/feeding.py --encoder tapfm-pocket --tiles 40 --workers 0 1 2
