# Two commands for a fresh clone: `make demo` and `make test`. Each sets up .venv by itself; a second
# call finds it ready. `make help` lists the rest.
#
#   PYTHON=python3.12   which interpreter makes .venv (3.11 or newer)
#   TORCH=...           how pip is to get torch, if not by the rule below: a wheel file, or
#                       "torch==2.13.0 --index-url <the CPU index named by PyTorch's install page>"
#   JOBS=4              test processes; default 2
#   ARGS="-k tied"      passed on to pytest

SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null \
	&& echo $$p && break; done)
TORCH ?=
JOBS ?= 2
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --no-input --disable-pip-version-check
INSTALL := $(PIP) install --quiet --constraint tests/constraints.txt
READY := $(VENV)/ready
MODEL := $(VENV)/ready-model
PEERS := $(VENV)/peers
CODE := ckptfmt tests benchmarks docs/examples spec

# Nothing outside .venv is to leak into it, and no test waits for a terminal.
export PYTHONNOUSERSITE := 1
export PYTHONPATH :=
export PIP_REQUIRE_VIRTUALENV := 1

# The test processes must agree on every test's name, also where a set's order is part of it.
export PYTHONHASHSEED := 0

.PHONY: help setup lint check test test-slow test-peers demo bench soak clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1@\2/p' $(firstword $(MAKEFILE_LIST)) | column -t -s @

demo: $(READY) $(MODEL) ## train a real model, kill it in the middle of a save, resume bit for bit
	$(BIN)/python docs/examples/demo.py

test: lint check ## everything a change must pass: lint, types, tidy and the default suite

test-slow: $(READY) $(MODEL) ## the long tests: crash loops, big trees, the demo
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m slow --timeout 1800 $(ARGS) </dev/null

test-peers: $(PEERS)/ready ## what Orbax, Flax and llama.cpp's library write and read, by themselves
	$(PEERS)/bin/python -m pytest -m peers --timeout 600 tests/unit/foreign $(ARGS) </dev/null

lint: $(READY) ## ruff and mypy --strict
	$(BIN)/ruff check --quiet --output-format concise $(CODE)
	$(BIN)/ruff format --quiet --check $(CODE)
	$(BIN)/mypy --no-error-summary

check: $(READY) ## the default suite alone
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m "not slow" $(ARGS) </dev/null

bench: $(READY) ## every benchmark, in its small size
	@for file in benchmarks/bench_*.py; do echo "== $$file"; $(BIN)/python $$file --small || exit 1; done

soak: $(READY) ## three trainers on one store and much trouble, for SECONDS (600), and ranks of a job, killed
	$(BIN)/python tests/soak/soak.py --seconds $(or $(SECONDS),600)
	$(BIN)/python tests/soak/ranks.py --kills 12

setup: $(READY) ## .venv with the package, its test tools and CPU frameworks

clean: ## remove .venv and everything that was made
	rm -rf $(VENV) .demo build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "ckptfmt needs Python 3.11, 3.12 or 3.13: make PYTHON=/path/to/python3" >&2; exit 2; }
	@echo "making $(VENV) with $$($(PYTHON) --version)"
	$(PYTHON) -m venv $(VENV)

# torch goes first and alone. Its CPU build is asked for by name (`+cpu`): the plain name can mean a
# CUDA build with gigabytes of libraries. Where pip sees no such build (macOS has only one kind, and
# needs none) the plain name is taken.
$(READY): pyproject.toml tests/requirements.txt tests/constraints.txt | $(BIN)/python
	@echo "installing torch, tensorflow and the package into $(VENV): some minutes, once"
ifneq ($(strip $(TORCH)),)
	$(INSTALL) $(TORCH)
else
	@$(INSTALL) torch==2.13.0+cpu 2>$(VENV)/torch.log \
	|| { echo "pip sees no torch build named +cpu here; taking the plain one (see TORCH in the Makefile)"; \
	     $(INSTALL) torch==2.13.0; }
endif
	$(INSTALL) --requirement tests/requirements.txt
	$(INSTALL) --editable '.[dev]'
	@touch $@

# An environment on top of .venv: it sees what is installed there, and nothing in .venv changes.
$(PEERS)/ready: tests/requirements-peers.txt tests/constraints.txt | $(READY)
	$(BIN)/python -m venv --clear $(PEERS)
	@base=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	own=$$($(PEERS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	echo "import site; site.addsitedir('$$base')" > "$$own/base.pth"
	$(PEERS)/bin/python -m pip --no-input --disable-pip-version-check install --quiet \
		--constraint tests/constraints.txt --requirement tests/requirements-peers.txt
	@touch $@

$(MODEL): docs/examples/requirements.txt | $(READY)
	$(INSTALL) --no-deps --requirement docs/examples/requirements.txt
	@touch $@
