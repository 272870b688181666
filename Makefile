# Each target sets up what it needs in .venv: nothing but Python 3.11 (or 3.10+) is assumed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c deploy/constraints.txt
NEEDS := pyproject.toml deploy/constraints.txt

.PHONY: demo test check bench format clean help

help:  ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

demo: $(VENV)/installed-demo  ## a service, a training that is killed and resumed, and its answers
	cd workers && ../$(BIN)/python -m examples.countdown.demo

test: $(VENV)/installed-dev  ## every test (a real Ray cluster, real msprobe, real databases)
	$(BIN)/python -m pytest

check: $(VENV)/installed-dev  ## format, lint, types, tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pyright
	$(BIN)/python -m pytest

bench: $(VENV)/installed-dev  ## every benchmark; ratios against a reference of the same run
	@for file in tests/benchmarks/bench_*.py; do echo "== $$file"; $(BIN)/python -m "tests.benchmarks.$$(basename $$file .py)" || exit 1; done

format: $(VENV)/installed-dev  ## format and mend what can be mended
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  ## remove what the targets made
	rm -rf $(VENV) .demo

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed-demo: $(NEEDS) | $(VENV)/bin/python
	$(INSTALL) -e '.[service,workers,msprobe,example]'
	@touch $@

$(VENV)/installed-dev: $(NEEDS) | $(VENV)/bin/python
	$(INSTALL) -e '.[service,workers,msprobe,example,notebook,dev]'
	@touch $@
