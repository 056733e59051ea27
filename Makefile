# Everything from nothing: each target makes its virtual environment and installs what it needs.
#   make demo      the main job: quantise a real model, measure it, reload it (under demo/)
#   make test      all tests, the slow ones too
#   make check     formatting and lint
#   make fixtures  the tiny models and data sets of examples/configs/ (under examples/fixtures/)
# Another environment: make test VENV=/tmp/env. Another interpreter: make test PYTHON=python3.12.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Two workers on two cores; every one runs torch on a single thread.
TEST_WORKERS ?= 2
PYTEST_ARGS ?=
# constraints.txt holds torch to a version that resolves to a CPU build of ordinary size.
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt

.PHONY: demo test check format fixtures clean

demo: $(VENV)/.installed-demo
	$(BIN)/hf-ext demo

test: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n $(TEST_WORKERS) $(PYTEST_ARGS)

check: $(VENV)/.installed-check
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

format: $(VENV)/.installed-check
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

fixtures: $(VENV)/.installed-fixtures
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python examples/fixtures.py

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache

# A stamp per set of requirements: nothing is installed again until the packaging files change.
$(VENV)/.installed-demo: pyproject.toml setup.py constraints.txt | $(BIN)/python
	$(INSTALL) --editable ".[demo]"
	touch $@

$(VENV)/.installed-dev: pyproject.toml setup.py constraints.txt | $(BIN)/python
	$(INSTALL) --editable ".[dev]"
	touch $@

$(VENV)/.installed-fixtures: pyproject.toml setup.py constraints.txt | $(BIN)/python
	$(INSTALL) --editable ".[trainers]"
	touch $@

# ruff alone: a lint run should not install torch.
$(VENV)/.installed-check: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) ruff
	touch $@

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
