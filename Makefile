# One command each; every one of them first makes .venv, or finds it made (.ci/bootstrap.py).
#   make test PYTEST_ARGS="-k scheduler"      make setup PYTHON=python3.12 TORCH_INDEX_URL=...

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=
PYTEST_WORKERS ?= 2
DEMO_ARGS ?=
BENCH_ARGS ?=
TRANSFORMERS ?=

BIN := $(VENV)/bin
# Whole files to processes that compute with one thread each: half the time on two cores.
PARALLEL := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist loadfile
OLDEST_TESTS := tests/hf_generate_shim tests/parity/test_model_parity.py tests/nanoserve_core/test_llm.py

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-oldest wild hf-conformance lint format bench clean distclean

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## make or update the virtual environment (.venv); does nothing when it is up to date
	@$(PYTHON) .ci/bootstrap.py --venv $(VENV)

demo: setup ## run the demo: the three doors on the shipped tiny checkpoint
	@$(BIN)/python examples/demo.py $(DEMO_ARGS)

test: setup ## run the whole CPU test suite
	@$(PARALLEL) $(PYTEST_ARGS)

test-oldest: setup ## the tests that touch transformers, with the oldest supported version of it
	@$(PYTHON) .ci/bootstrap.py --venv $(VENV) --oldest
	@PYTHONPATH=$(VENV)/oldest $(PARALLEL) $(OLDEST_TESTS) $(PYTEST_ARGS)

wild: setup ## tests with accelerate, PEFT, TRL and lm-evaluation-harness, which it installs into .venv
	@$(PYTHON) .ci/bootstrap.py --venv $(VENV) --extra wild
	@$(BIN)/python -m pytest tests/hf_generate_shim/wild $(PYTEST_ARGS)

hf-conformance: setup ## transformers' own generation tests, served: TRANSFORMERS=path of a checkout
	@test -d "$(TRANSFORMERS)/tests/generation" || { \
	  echo "TRANSFORMERS=$(TRANSFORMERS) is no checkout of transformers: expected a folder with tests/generation," \
	    "at the tag of the installed version. Pass TRANSFORMERS=path."; exit 2; }
	@$(PYTHON) .ci/bootstrap.py --venv $(VENV) --extra wild
	@cd "$(TRANSFORMERS)" && "$(abspath $(BIN))/python" -m pytest tests/models/qwen3 tests/generation \
	  -k generate -p hf_generate_shim.pytest_plugin $(PYTEST_ARGS)

lint: setup ## ruff, mypy --strict, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup ## rewrite the sources in the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup ## measure speed against transformers' generate
	@$(BIN)/python examples/benchmarks/bench.py $(BENCH_ARGS)

clean: ## remove caches and build products
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis .benchmarks out
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean ## remove the virtual environment too
	rm -rf $(VENV)
