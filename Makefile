# Every target makes the virtual environment itself when it is missing or older than what it is made from.
PYTHON ?= python3
VENV   := .venv
READY  := $(VENV)/.ready
BIN    := $(VENV)/bin
# the viewer's pages: built where npm is there
PAGES  := src/tapfm/viewer/static/index.html

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint typecheck bench docs

help:  ## list these targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(READY) $(PAGES)  ## make the virtual environment (.venv) and the viewer's pages: all that the other targets need

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "tapfm needs Python 3.11 or newer; try: make $(or $(MAKECMDGOALS),setup) PYTHON=python3.11"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

$(PAGES): $(wildcard frontend/src/*) frontend/build.mjs frontend/package.json frontend/package-lock.json
	@if ! command -v npm >/dev/null; then echo "npm is not there: the pages of tapfm view are left out"; \
	elif npm --prefix frontend ci --ignore-scripts --loglevel=error >/dev/null && npm --prefix frontend run --silent build; \
	then echo "built the pages of tapfm view"; \
	else echo "npm could not build the pages of tapfm view: they are left out"; fi

demo: $(READY) $(PAGES)  ## go through all of tapfm on painted slides, in minutes, without a GPU (OPTIONS=--full: longer)
	@$(BIN)/tapfm demo $(OPTIONS)

test: $(READY) $(PAGES)  ## run all tests
	@# one thread each: of small encoders, threads only wait for each other; bytecode: many tests start processes
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses logical --maxprocesses 8 --dist loadfile

lint: $(READY)  ## check style, and that public names have a caller
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/unused_names.py

typecheck: $(READY) $(PAGES)  ## check types
	$(BIN)/mypy
	@if [ -d frontend/node_modules ]; then npm --prefix frontend run --silent check; \
	else echo "npm has not run: the pages of tapfm view are not checked"; fi

# two versions side by side: benchmarks/compare_speed.py OLD_COMMIT
bench: $(READY)  ## measure what needs no GPU on this machine: starting, reading, viewing, gradients of drawn tiles, one step, feeding an encoder
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/reading.py
	$(BIN)/python benchmarks/viewer.py
	$(BIN)/python benchmarks/subset.py
	$(BIN)/python benchmarks/adaptation_step.py
	$(BIN)/python benchmarks/feeding.py --encoder tapfm-pocket --tiles 40 --workers 0 1 2

docs: $(READY)  ## write the reference pages from the code, and build the site of the docs into site/
	OMP_NUM_THREADS=1 $(BIN)/python tools/reference.py
	@# the variable: no notice of a later mkdocs, which constraints.txt does not install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "built the docs: site/index.html"
