# Everything runs in .venv, at the versions in constraints.txt. `make` alone lists the targets.
PYTHON ?= python3
WORKERS ?= 2
BIN := .venv/bin
# One thread per process: tests run side by side, and small tensors are slower on several threads.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

.DEFAULT_GOAL := help
.PHONY: help install demo example test coverage lint types imports check bench bench-quick format docs clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: .venv/installed ## Install the project and its tools into .venv

# The stamp is younger than what it was made from, so a second run does nothing, and an install
# that was interrupted is taken up again.
.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "The pinned tools need Python 3.11 or later. Found: $$($(PYTHON) --version). Try make PYTHON=python3.12"; exit 1; }
	test -x $(BIN)/python && $(BIN)/python -m pip --version >/dev/null || $(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt -e '.[dev]'
	@touch $@

demo: install ## The paper's headline in two minutes: averaging against agreement; demo/report.html
	$(BIN)/consilience run synthetic --method and-mask erm --runs demo
	$(BIN)/consilience report demo

example: install ## Four environments, one shared feature: a table, and a picture in demo/
	$(BIN)/python examples/linear_regression.py --folder demo --show

test: install ## Run the tests, and measure their coverage
	$(ONE_THREAD) $(BIN)/python -m pytest -n $(WORKERS) --cov --cov-report=term

coverage: install ## Fail unless the tests that ran last reached 95% of the library
	$(BIN)/python -m coverage report --fail-under=95 --include='$(LIBRARY)'
LIBRARY := */consilience/agreement.py,*/consilience/report.py,*/consilience/_verification.py,*/consilience/rules/*,*/consilience/observation/*,*/consilience/optim/*,*/consilience/consistency/*

lint: install ## Check style
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: install ## Check types
	$(BIN)/mypy

imports: install ## Check that imports point one way
	$(BIN)/lint-imports

check: lint types imports test coverage ## All of these

bench: .venv/benched ## Time what the docs give times of, in a few minutes; writes to bench/
	$(ONE_THREAD) $(BIN)/python -m benchmarks
	@for module in scaling applying masking optimizer_step; do \
		printf '\n== %s\n' $$module; $(ONE_THREAD) $(BIN)/python -m benchmarks.$$module || exit 1; done

bench-quick: install ## Whether the benchmarks run, on small workloads
	$(ONE_THREAD) $(BIN)/python -m benchmarks --quick --out bench/quick
	$(ONE_THREAD) $(BIN)/python -m benchmarks.scaling --seconds 0 --environments 2
	$(ONE_THREAD) $(BIN)/python -m benchmarks.applying --rounds 1
	$(ONE_THREAD) $(BIN)/python -m benchmarks.masking --seconds 0.01
	$(ONE_THREAD) $(BIN)/python -m benchmarks.optimizer_step --rounds 2

# What agreement is compared with, for `make bench` alone.
.venv/benched: .venv/installed
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt -e '.[bench]'
	@touch $@

docs: install ## Write again what the docs take from the code: tables and pictures
	$(BIN)/python docs/supported_operations.py
	$(BIN)/python docs/pictures/votes.py
	$(BIN)/python -m consilience.paper.catalogue > docs/figures.md
	$(BIN)/python examples/linear_regression.py --folder demo
	$(BIN)/consilience figure masked-not-frozen --out demo
	cp demo/linear_regression.svg demo/masked-not-frozen.svg docs/pictures

format: install ## Put code into the project's style
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean: ## Remove what was made, but for .venv, runs/ and data/
	rm -rf build dist demo .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .coverage htmlcov
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
