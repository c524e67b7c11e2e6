# The index of this project's habits. `make` alone lists the targets.
# Needs make, a POSIX shell and Python 3.11 to 3.13; everything else goes into $(VENV).
# Variables: PYTHON (interpreter for the environment), VENV (its folder), VENV_ARGS (for `python -m venv`, for example
# --system-site-packages to use a torch that is already installed), PYTEST_ARGS, PROMPT, MAX_TOKENS, BACKEND, NANO (folder
# of the nano's run), DRAFT (folder of its draft head, where that is elsewhere).

VENV ?= .venv
PYTEST_ARGS ?=
PROMPT ?= def fibonacci(n):
MAX_TOKENS ?= 96
BACKEND ?=
PY := $(VENV)/bin/python
NANO := build/nano
DRAFT ?=

export PYTHON VENV_ARGS PROMPT

.DEFAULT_GOAL := help
.PHONY: help run test check lint types format bench wheel conform nightly nano-install golden clean distclean env env-dev

help: ## list the targets
	@awk 'BEGIN { FS = ":.*## " } /^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: env ## install m31 and stream code from the bundled nano
	$(VENV)/bin/m31 run "$$PROMPT" --max-tokens $(MAX_TOKENS) --temperature 0.7 $(if $(BACKEND),--backend $(BACKEND))

test: env-dev ## set up the tests and run them (the pull-request set)
	$(PY) -m pytest -m "not nightly" $(PYTEST_ARGS)

check: lint types ## everything that judges the source without running it

lint: env-dev ## ruff: rules and formatting
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: env-dev ## mypy, strict
	$(PY) -m mypy

format: env-dev ## rewrite the source in the house format
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

bench: env-dev ## compare the reference backend with transformers on this machine
	$(PY) benchmarks/reference.py

wheel: env-dev ## build the wheel into dist/
	$(PY) -m build --no-isolation --wheel --outdir dist

conform: env-dev ## the whole conformance suite on the reference (BACKEND=NAME: on another); some 7 minutes
	$(VENV)/bin/m31 conform run --backend $(or $(BACKEND),reference) --out build/conformance -j 2

nightly: env-dev conform ## the whole test suite, slow tests included, whole conformance runs and mutants of the reference
	$(PY) -m pytest $(PYTEST_ARGS)
	$(VENV)/bin/m31 conform selftest --backend reference --matrix build/faults.csv
	$(PY) tools/mutate.py

nano-install: env ## put the trained nano ($(NANO), $(DRAFT)) into the package
	$(PY) tools/nano_install.py $(NANO) $(if $(DRAFT),--draft $(DRAFT))

golden: env ## compute the nano's golden values again
	$(PY) -m m31.conformance.golden write
	$(PY) -m m31.conformance.golden write --arithmetic exact --kv float32 --index float32  # for backends that round nothing

clean: ## remove what the targets above produced, except the environment and what was trained
	rm -rf dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean ## clean, and remove the environment and what was trained
	rm -rf build $(VENV)

env:
	@sh tools/venv.sh $(VENV)

env-dev:
	@sh tools/venv.sh $(VENV) dev
