# Everything a fresh machine needs is set up by the first target that needs it: Linux, Python 3.11 or newer, make.
PYTHON ?= python3
VENV ?= .venv
TORCH := 2.13.0
UV := 0.13.9
# Where pip finds no CPU build of torch by itself, PyTorch's own index has one.
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu

BIN := $(VENV)/bin
READY := $(VENV)/.ready
READY_030 := .venv-0.30/.ready

.PHONY: demo test test-full lint types unit e2e lock format clean

demo: $(READY)
	$(BIN)/trivet demo $(ARGS)

test: lint types
	$(BIN)/pytest -m "not full" $(ARGS)

test-full: lint types $(READY_030)
	$(BIN)/pytest $(ARGS)
	TRIVET_E2E_CONNECTOR=NixlConnector $(BIN)/pytest -m e2e $(ARGS)
	.venv-0.30/bin/pytest -m e2e $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

unit: $(READY)
	$(BIN)/pytest -m "not e2e and not full" $(ARGS)

e2e: $(READY)
	$(BIN)/pytest -m "e2e and not full" $(ARGS)

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(READY): requirements/cpu.lock pyproject.toml
	$(call install,$(VENV),requirements/cpu.lock)

$(READY_030): requirements/cpu-0.30.lock pyproject.toml
	$(call install,.venv-0.30,requirements/cpu-0.30.lock)

# install(folder, lock): torch by itself, everything else from the lock, exactly; then this tree
define install
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "trivet needs Python 3.11 or newer, this is " + sys.version.split()[0] + ": make PYTHON=python3.12")'
	@echo "setting up $(1) (a few minutes, once)"
	$(PYTHON) -m venv $(1)
	$(1)/bin/pip install -q --disable-pip-version-check uv==$(UV)
	$(1)/bin/pip install -q --disable-pip-version-check --no-deps torch==$(TORCH)+cpu \
	  || $(1)/bin/pip install --disable-pip-version-check --no-deps --index-url $(TORCH_CPU_INDEX) torch==$(TORCH)+cpu
	VIRTUAL_ENV=$(1) $(1)/bin/uv pip install --no-deps --require-hashes -r $(2)
	VIRTUAL_ENV=$(1) $(1)/bin/uv pip install -q --no-deps --no-build-isolation -e .
	@touch $(1)/.ready
endef

# Locks: every wheel of every package but torch, by hash, for Python 3.11 and newer.
lock: $(READY)
	$(BIN)/uv pip compile pyproject.toml requirements/cpu.in --extra cpu --extra dev $(LOCK_FLAGS) -o requirements/cpu.lock
	$(BIN)/uv pip compile pyproject.toml requirements/cpu-0.30.in --extra cpu --extra dev $(LOCK_FLAGS) -o requirements/cpu-0.30.lock

LOCK_FLAGS := --override requirements/overrides.txt --universal --python-version 3.11 --generate-hashes --no-header -q

clean:
	rm -rf .venv .venv-0.30 .mypy_cache .pytest_cache .ruff_cache
