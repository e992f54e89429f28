# All set-up happens in .venv and in edged's state folder. `make help` lists what there is.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup run test chaos check fix clean venv

VENV ?= .venv
PYTHON ?=
ARGS ?=
BIN := $(VENV)/bin
# Vendor images leak these into every shell; nothing of them belongs into our environment.
unexport PYTHONPATH PYTHONHOME PYTHONSTARTUP VIRTUAL_ENV CONDA_PREFIX CONDA_DEFAULT_ENV

help:  ## list the targets
	@echo "make TARGET [PYTHON=python3.12] [ARGS=...]"
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  \1\t\2/p' $(MAKEFILE_LIST)

venv:
	@tools/venv.sh $(VENV) '.[dev]' $(PYTHON)

setup: venv  ## make .venv with everything, fetch and export the demo model
	@$(BIN)/edged models fetch demo

# A broker that is not there is no error: edged waits for it. TWIN=1 or TWIN=field: a board.
run: setup  ## start the daemon, with TWIN=1 on a simulated NPU; ARGS go to `edged run`
	@$(BIN)/edged run --set mqtt.url=mqtt://127.0.0.1:1883 \
		$(if $(TWIN),--twin $(filter-out 1,$(TWIN))) $(ARGS)

# Two files at a time, since most tests wait for processes; the smoke of the chaos suite by itself.
test:  ## set up what the tests need and run them; ARGS go to pytest instead
	@tools/test_packages.sh
	@$(MAKE) --no-print-directory setup
	@export PATH=$$PATH:/usr/sbin; if [ -n "$(ARGS)" ]; then $(BIN)/pytest $(ARGS); else \
		$(BIN)/pytest -n 2 --dist loadfile -m 'not chaos'; $(BIN)/pytest tests/chaos -m smoke; fi

chaos: venv  ## break the daemon in every way there is, under load; ARGS go to pytest
	@tools/test_packages.sh
	@PATH=$$PATH:/usr/sbin $(BIN)/pytest tests/chaos -m chaos $(ARGS)

check: venv  ## linter, format, types and unit files; changes nothing
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy
	@$(BIN)/pytest tests/test_systemd_units.py

fix: venv  ## repair what the linter and the formatter can
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

clean:  ## remove environments and caches (not the models)
	rm -rf .venv .venv-* .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
	find edged tests tools -name __pycache__ -prune -exec rm -rf {} +
