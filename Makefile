# Every target sets up what it needs in .venv; the second call is fast.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: help demo browser test test-all lint format docs labs bench clean
.DEFAULT_GOAL := help

help:  ## Show the targets
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/'

.venv/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "scalewise needs Python 3.11 or newer; run 'make PYTHON=python3.12 ...'"; exit 2; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: .venv/ready  ## One worker, then eight workers on one and on two processes: the same bytes
	@$(BIN)/python examples/demo.py

browser:  ## Install Chromium for the tests of the page, if it is missing
	@command -v chromium > /dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null \
	  && { apt-get update -qq && DEBIAN_FRONTEND=noninteractive timeout 300 apt-get install -y -qq --no-install-recommends chromium; } \
	  > /dev/null 2>&1; } || echo "Chromium is not available: tests in a browser are skipped"

# A test that fails is repeated alone, to say whether it was disturbed; it has failed all the same.
PYTEST := GOMP_SPINCOUNT=2000 $(BIN)/python -m pytest
REPORT = { code=$$?; [ $$code = 1 ] && echo "Repeated alone, as a report: what passes now is disturbed by its neighbours." \
	  && $(PYTEST) --last-failed --last-failed-no-failures none; exit $$code; }

test: .venv/ready  ## What everybody needs (CPU, at most 15 minutes on 2 cores)
	@$(PYTEST) -n 2 --dist loadfile --no-loadscope-reorder -m "not heavy" || $(REPORT)

test-all: .venv/ready browser  ## What needs heavy components: trainers, trackers, notebooks, a browser, namespaces, faults, memory limits (at most 45 minutes)
	@$(PYTEST) -n 2 --dist loadfile --no-loadscope-reorder -m heavy || $(REPORT)

lint: .venv/ready  ## Format check, lint, types
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

format: .venv/ready  ## Rewrite the code in the project's format
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

docs: .venv/ready  ## Build the documentation into docs/build/html
	@$(BIN)/python -m sphinx -W --keep-going -n -q -b html -d docs/build/doctrees docs docs/build/html
	@echo "docs/build/html/index.html"

labs: .venv/ready  ## Execute the notebooks and write their pages (LABS='1 4' for some)
	@$(BIN)/python labs/render.py $(LABS)

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
	rm -rf .venv .venv-bench runs docs/build .pytest_cache .mypy_cache .ruff_cache
