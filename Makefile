# make train   train a small mixture-of-experts model on four CPU processes
# make test    run the test suite
#
# Both create .venv and install pinned versions on first use. Plain `pip install torch` on x86 Linux fetches a CUDA
# build of several gigabytes; the CPU build is about 200 MB:
#
#     make test TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
#
# Further: make lint | soak | bench | clean. PYTHON names the interpreter that creates .venv (3.11 or later).

PYTHON ?= python3
TORCH_INDEX_URL ?=
DS_ACCELERATOR ?= cpu
CONFIG ?= launch/configs/moe_cpu_small.json
NPROC ?= 4
PYTEST_ARGS ?=

BIN := .venv/bin
PIP := $(BIN)/pip --disable-pip-version-check
TORCH := $(shell grep '^torch==' requirements/cpu.txt)
PINS := requirements/cpu.txt requirements/constraints.txt

export DS_ACCELERATOR

.DEFAULT_GOAL := help
.PHONY: help train test lint soak bench clean

help:
	@sed -n 's/^# \{0,1\}//p' Makefile | head -9

train: .venv/.installed-cpu
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --no-python --nproc-per-node $(NPROC) $(BIN)/xmoe train --config $(CONFIG) --overwrite

test: .venv/.installed-test
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile $(PYTEST_ARGS)

lint: .venv/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

soak: .venv/.installed-test
	OMP_NUM_THREADS=1 $(BIN)/pytest -m soak $(PYTEST_ARGS)

# Scripts, not modules: the root of the clone must stay off sys.path, where kernels/ would hide other packages.
bench: .venv/.installed-test
	@set -e; for script in benchmarks/bench_*.py; do echo "$$script"; $(BIN)/python "$$script"; done

clean:
	rm -rf .venv build dist xmoe.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "The pinned requirements need Python 3.11 or later, this is " + sys.version.split()[0] + ": set PYTHON=...")'
	$(PYTHON) -m venv .venv

# One stamp per requirements file, so that a second call starts at once. torch comes first and alone: only it is
# taken from TORCH_INDEX_URL.
.venv/.installed-cpu: $(PINS) setup.py pyproject.toml | .venv/bin/python
	$(PIP) install $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL)) $(TORCH)
	$(PIP) install -r requirements/cpu.txt
	$(PIP) install -e . --no-deps
	touch $@

.venv/.installed-test: requirements/test.txt .venv/.installed-cpu
	$(PIP) install -r requirements/test.txt
	touch $@
