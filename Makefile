# Every target sets up what it needs in .venv; the second call is fast.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: help demo test lint format bench clean
.DEFAULT_GOAL := help

help:  ## Show the targets
	@grep -E '^[a-z]+:.*##' Makefile | sed -E 's/:.*## /\t/'

.venv/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "scalewise needs Python 3.11 or newer; run 'make PYTHON=python3.12 ...'"; exit 2; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: .venv/ready  ## One worker, then eight workers on one and on two processes: the same bytes
	@$(BIN)/python examples/demo.py

test: .venv/ready  ## All tests (CPU, at most 15 minutes on 2 cores)
	@$(BIN)/python -m pytest -n 2 --dist loadfile

lint: .venv/ready  ## Format check, lint, types
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

format: .venv/ready  ## Rewrite the code in the project's format
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

# The peers have an environment of their own, so that none of them is needed to develop.
.venv-bench/ready: pyproject.toml constraints.txt benchmarks/peers.txt
	$(PYTHON) -m venv .venv-bench
	@.venv-bench/bin/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[images]' -r benchmarks/peers.txt \
	  > .venv-bench/install.log 2>&1 \
	  || { echo "the peers in benchmarks/peers.txt could not be installed; see .venv-bench/install.log"; exit 2; }
	@touch $@

bench: .venv-bench/ready  ## Measure speed against other tools into benchmarks/results/ (BENCH='--rounds 5' to shorten)
	@.venv-bench/bin/python benchmarks/speed.py $(BENCH)
	@.venv-bench/bin/python benchmarks/loaders.py
	@.venv-bench/bin/python benchmarks/optimizers.py

clean:  ## Remove what the other targets made
	rm -rf .venv .venv-bench runs .pytest_cache .mypy_cache .ruff_cache
