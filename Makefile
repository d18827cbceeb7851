# Every target except help creates the virtual environment if it is missing, or older than pyproject.toml or
# constraints.txt.
PYTHON ?= python3
VENV   := .venv
READY  := $(VENV)/.ready
BIN    := $(VENV)/bin
# the viewer's pages; built if npm is installed
PAGES  := src/tapfm/viewer/static/index.html
# where make wheel writes
DIST   ?= dist

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint typecheck bench docs wheel

help:  ## list these targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(READY) $(PAGES)  ## create the virtual environment (.venv) and build the viewer's pages; other targets do so when needed

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "tapfm needs Python 3.11 or newer; try: make $(or $(MAKECMDGOALS),setup) PYTHON=python3.11"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

$(PAGES): $(wildcard frontend/src/*) frontend/build.mjs frontend/package.json frontend/package-lock.json
	@if ! command -v npm >/dev/null; then echo "npm was not found; skipping the pages of tapfm view. To build them, install Node.js 18 or newer, which includes npm (https://nodejs.org)."; \
	elif npm --prefix frontend ci --ignore-scripts --loglevel=error >/dev/null && npm --prefix frontend run --silent build; \
	then echo "built the pages of tapfm view"; \
	else echo "npm could not build the pages of tapfm view; skipping them. To see the error: npm --prefix frontend ci && npm --prefix frontend run build"; fi

demo: $(READY) $(PAGES)  ## run the whole workflow on synthetic slides, in minutes, without a GPU (OPTIONS=--full: longer)
	@$(BIN)/tapfm demo $(OPTIONS)

test: $(READY) $(PAGES)  ## run all tests
	@# one thread per process: more threads slow down small encoders; with bytecode files: many tests start processes
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses logical --maxprocesses 8 --dist loadfile

lint: $(READY)  ## check style, unused public names and plain English
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/unused_names.py
	$(BIN)/python tools/check_language.py

typecheck: $(READY) $(PAGES)  ## check types
	$(BIN)/mypy
	@if [ -d frontend/node_modules ]; then npm --prefix frontend run --silent check; \
	else echo "frontend/node_modules is missing; not checking the pages of tapfm view. Install Node.js and run npm --prefix frontend ci."; fi

# to compare two versions: benchmarks/compare_speed.py OLD_COMMIT
bench: $(READY)  ## run benchmarks that need no GPU: startup, tile reading, viewer, sampled gradients, one step, data loading
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/reading.py
	$(BIN)/python benchmarks/viewer.py
	$(BIN)/python benchmarks/backward_tiles.py
	$(BIN)/python benchmarks/adaptation_step.py
	$(BIN)/python benchmarks/data_loading.py --encoder tapfm-pocket --tiles 40 --workers 0 1 2

docs: $(READY)  ## generate the reference pages from the code, and build the docs site in site/
	OMP_NUM_THREADS=1 $(BIN)/python tools/reference.py
	@# NO_MKDOCS_2_WARNING disables the notice about mkdocs 2, which constraints.txt does not install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "built the docs: site/index.html"

wheel: $(READY) $(PAGES)  ## build a release wheel in dist/; it contains the pages of tapfm view, so this needs npm
	@$(MAKE) --no-print-directory --question $(PAGES) \
		|| { echo "There is no release wheel without the current pages of tapfm view, which could not be built (see above)."; exit 2; }
	$(BIN)/python tools/build_wheel.py --out '$(DIST)'
