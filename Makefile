# `make` lists the targets. Each installs what it needs, pinned, into .venv and only when that has changed.

VENV := .venv
PYTHON := $(VENV)/bin/python
# Flags for demo and coverage: make demo FLAGS="--mesh=data=4 --steps=100"
FLAGS :=

.DEFAULT_GOAL := help
.PHONY: help demo test long lint bench coverage clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.core ## Train a small GPT on a mesh of four CPU devices and on one device, and compare
	@TF_CPP_MIN_LOG_LEVEL=3 $(PYTHON) -m tfpar.demo $(FLAGS)

test: $(VENV)/.test ## Run the tests, without those marked long
	TF_CPP_MIN_LOG_LEVEL=3 $(PYTHON) -m pytest -q -n auto

long: $(VENV)/.test ## Run the tests marked long, and kill each kind of process five times
	TF_CPP_MIN_LOG_LEVEL=3 TFPAR_REPETITIONS=5 $(PYTHON) -m pytest -q -n auto -m long
	TF_CPP_MIN_LOG_LEVEL=3 TFPAR_REPETITIONS=5 $(PYTHON) -m pytest -q tests/test_parameter_server_failures.py -m "not long"

lint: $(VENV)/.lint ## Check style and format
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

bench: $(VENV)/.bench ## Run every benchmarks/*/run.py
	@for script in benchmarks/*/run.py; do \
	    if [ -e "$$script" ]; then echo "$$script"; $(PYTHON) "$$script" || exit 1; else echo "There is no benchmark yet."; fi; \
	done

coverage: $(VENV)/.coverage ## Compare every layer and model with one device, write docs/coverage.md; FLAGS="--only=layers/Dense"
	@PYTHONPATH=tests $(PYTHON) -m model_coverage.run $(FLAGS)

clean: ## Remove the virtual environment, caches and build products
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

INPUTS := $(VENV)/.made setup.py pyproject.toml constraints.txt
INSTALL = @echo "Installing packages into $(VENV) (a minute or two the first time)" && \
    $(PYTHON) -m pip install -qq --no-compile --disable-pip-version-check -c constraints.txt -e

$(VENV)/.made:
	@for python in python3.11 python3; do \
	    if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	        $$python -m venv $(VENV) && touch $@; exit; \
	    fi; \
	done; \
	echo "tfpar needs Python 3.11 or newer, but neither python3.11 nor such a python3 is on the PATH." >&2; exit 1

$(VENV)/.core: $(INPUTS)
	$(INSTALL) . && touch $@

$(VENV)/.test: $(INPUTS)
	$(INSTALL) '.[test]' && touch $@

$(VENV)/.lint: $(INPUTS)
	$(INSTALL) '.[lint]' && touch $@

$(VENV)/.bench: $(INPUTS)
	$(INSTALL) '.[bench]' && touch $@

$(VENV)/.coverage: $(INPUTS)
	$(INSTALL) '.[coverage]' && touch $@
