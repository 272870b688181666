# Each target sets up what it needs in .venv: nothing but Python 3.11 (or 3.10+) is assumed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c deploy/constraints.txt
NEEDS := pyproject.toml deploy/constraints.txt
# verl has an environment of its own: it names the versions of what it needs more narrowly.
VERL := .venv-verl
VERL_INSTALL := $(VERL)/bin/python -m pip install --quiet --disable-pip-version-check -c deploy/constraints-verl.txt
VERL_NEEDS := pyproject.toml deploy/constraints-verl.txt
TRACKERS := .venv-trackers
# As .venv, with what the tests of other trainers import.
OWN := .venv-own
# The lowest versions that pyproject.toml names, on the lowest Python that is found here.
LOWEST := .venv-lowest
PYTHON_LOWEST ?= $(shell for python in python3.10 $(HOME)/.pyenv/versions/3.10.*/bin/python $(PYTHON); \
	do $$python -m venv --help >/dev/null 2>&1 && echo $$python && break; done)
LOWEST_INSTALL := $(LOWEST)/bin/python -m pip install --quiet --disable-pip-version-check -c deploy/constraints-lowest.txt
LOWEST_NEEDS := pyproject.toml deploy/constraints-lowest.txt

# Where the environment forbids bytecode, each of the tests' processes would compile every module anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo dist pictures test test-ray test-trainings test-trackers test-verl test-own test-lowest verl check check-fast prose bench bench-verl soak trial-head-loss trial-ranks format clean help

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

demo: $(VENV)/installed-demo  ## a service, a training that is killed and resumed, and its answers
	cd workers && ../$(BIN)/python -m examples.countdown.demo

# A file's tests stay together, for what they share: often a service of their own. One process more
# than cores: many tests wait for processes, browsers and leases. Two clusters at a time, on whatever
# machine: more on two cores, and Ray's own deadlines for a start pass.
PARALLEL := -m "not ray" -n $(shell echo $$(($$(getconf _NPROCESSORS_ONLN) + 1))) --dist loadfile
# Whole trainings of the examples, of TRL, Lightning and Hugging Face's Trainer: as with verl, by themselves.
TRAININGS := tests/examples/countdown/test_false_alarms.py tests/examples/attach \
	$(wildcard tests/workers/integrations/test_trl*.py)
# It takes longest: begun last, it would be alone on the machine in the end.
LONGEST := tests/service/http/test_page.py
WITH_RAY := -m ray -n 2 --dist loadfile
# Nothing runs beside it: it holds what is killed to the seconds after which it answers again.
RAY_ALONE := tests/integration/test_faults.py
# The longest come first, so that none of them is left when the others are done.
RAY_FIRST := $(addprefix tests/integration/test_,clusters.py compare_over_ray.py keeping_over_ray.py) \
	$(addprefix tests/integration/test_,nodes_over_ray.py head_loss.py) \
	tests/examples/countdown/test_train_on_ray.py \
	$(addprefix tests/integration/test_,triggers_over_ray.py replay_over_ray.py captures_over_ray.py)
RAY := $(RAY_FIRST) $(filter-out $(RAY_FIRST) $(RAY_ALONE),$(wildcard tests/integration/test_*.py tests/examples/*/test_*.py))

test: $(VENV)/installed-dev  ## every test but those of the next targets: no cluster, no whole training
	$(BIN)/python -m pytest $(PARALLEL) --no-loadscope-reorder $(addprefix --ignore=,$(TRAININGS)) $(LONGEST) tests

test-ray: $(VENV)/installed-dev  ## the tests that start a Ray cluster, and what survives the kill of each process
	$(BIN)/python -m pytest $(WITH_RAY) --no-loadscope-reorder $(RAY)
	$(BIN)/python -m pytest -m ray $(RAY_ALONE)

test-trainings: $(VENV)/installed-dev  ## whole trainings of TRL, Lightning, Hugging Face's Trainer; 200 healthy steps without a false alarm
	$(BIN)/python -m pytest $(PARALLEL) --no-loadscope-reorder $(TRAININGS)

test-verl: $(VERL)/installed-dev  ## whole trainings of real verl on CPU, our numbers against its own, its tests with us
	$(VERL)/bin/python -m pytest -n 2 --dist loadfile tests/verl
	$(VERL)/bin/python tests/own_tests/compare.py verl

# make test-own SOURCES=FOLDER: checkouts of their repositories, by these names, as far as they are there.
test-own: $(OWN)/installed  ## the own CPU tests of TRL, slime and SkyRL (SOURCES=FOLDER of checkouts), without us and with us
	@test -d "$(SOURCES)" || { echo 'make test-own SOURCES=FOLDER, a folder with checkouts: trl, slime, SkyRL'; exit 2; }
	@for name in trl slime SkyRL; do test ! -d "$(SOURCES)/$$name" || \
		{ echo "== $$name"; $(OWN)/bin/python tests/own_tests/compare.py $$name --checkout "$(SOURCES)/$$name"; } || exit 1; done

# By itself: Trackio and SwanLab exclude versions that the others are tried with.
test-trackers: $(TRACKERS)/installed  ## forwarding into six real trackers
	$(TRACKERS)/bin/python -m pytest -n 2 tests/client/forwarding

verl: $(VERL)/installed  ## .venv-verl: verl and what its trainers need on CPU

# Of the tests with Ray those that call much of its interface: the others differ in what is asked.
RAY_LOWEST := $(addprefix tests/integration/test_,probe_over_ray.py writers.py compare_tasks_over_ray.py) \
	tests/examples/countdown/test_train_on_ray.py::test_two_ranks_train_stop_and_resume_to_the_same_numbers

# What no version can break, at length: our own state machine, rules on numbers and tables, and what
# a browser makes of a page that the other tests hold to be the same.
PURE := tests/test_structure.py tests/deploy tests/examples/countdown/test_false_alarms.py \
	tests/service/core tests/service/rules tests/service/http/test_page.py \
	tests/service/figures/test_in_browser.py \
	$(addprefix tests/service/coordinator/,test_journal.py rules/test_triggering.py test_weights.py) \
	$(addprefix tests/service/compare/,test_html_in_browser.py operators/test_divergence.py operators/test_evidence.py)

test-lowest: $(LOWEST)/installed  ## the tests that versions can break, with the lowest that are supported
	@$(LOWEST)/bin/python -c 'import sys; print("Python %d.%d" % sys.version_info[:2], "" if sys.version_info < (3, 11) else "(3.10, the lowest supported, was not found)")'
	$(LOWEST)/bin/python -m pytest $(PARALLEL) $(addprefix --ignore=,$(PURE))
	$(LOWEST)/bin/python -m pytest $(WITH_RAY) $(RAY_LOWEST)
	$(LOWEST)/bin/python -m pytest -m ray tests/integration/test_clusters.py -k ray_start_left

check: $(VENV)/installed-dev  ## format, lint, types, tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pyright
	$(BIN)/python -m tests.support.prose --check
	$(MAKE) test test-ray test-trainings

# What needs neither Ray, a database, a browser nor msprobe, but the longest searches of hypothesis.
FAST := tests/test_structure.py tests/client $(addprefix tests/service/,core statistics) \
	$(addprefix tests/service/rules/test_,conditions.py defaults.py messages.py periods.py rules.py series.py) \
	$(addprefix --ignore=tests/,client/engines client/forwarding client/test_against_the_service.py client/test_cli.py client/test_notebooks.py client/test_top.py \
	service/core/test_any_order.py)

check-fast: $(VENV)/installed-dev  ## while editing: format, lint, mypy, the tests of pure code
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python -m tests.support.prose --check
	$(BIN)/mypy & $(BIN)/python -m pytest -q $(PARALLEL) $(FAST); status=$$?; wait $$! && exit $$status

prose: $(VENV)/installed-dev  ## the sentences of documentation and docstrings that are hard to read
	$(BIN)/python -m tests.support.prose

bench: $(VENV)/installed-dev  ## every benchmark; ratios against a reference of the same run
	@for file in $(filter-out %/bench_verl.py,$(wildcard tests/benchmarks/bench_*.py)); do echo "== $$file"; $(BIN)/python -m "tests.benchmarks.$$(basename $$file .py)" || exit 1; done

MINUTES := 60
soak: $(VENV)/installed-dev  ## an hour of load with kills (MINUTES=60): nothing lost, nothing twice, nothing grows
	$(BIN)/python -m tests.support.soak $(MINUTES)

bench-verl: $(VERL)/installed-dev  ## what the plugin costs a step of verl, and what the noise is
	$(VERL)/bin/python -m tests.benchmarks.bench_verl

trial-head-loss: $(VENV)/installed-dev  ## kill every Ray process of a head, start it again: what is back, how soon
	$(BIN)/python -m tests.support.head_loss

RANKS := 10000
trial-ranks: $(VENV)/installed-dev  ## simulated ranks (RANKS=10000) on a real coordinator: delays, memory, agreement, answers
	$(BIN)/python -m tests.benchmarks.bench_ranks $(RANKS) 30 3

pictures: $(VENV)/installed-dev  ## draw docs/pictures/ anew: the page, a terminal, a notebook
	$(BIN)/python -m tests.support.pictures

dist: $(VENV)/installed-dev  ## the wheel and the source archive of a release, in dist/
	$(BIN)/python -m hatchling build --clean

format: $(VENV)/installed-dev  ## format and mend what can be mended
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  ## remove what the targets made
	rm -rf $(VENV) $(VERL) $(LOWEST) $(TRACKERS) $(OWN) .demo dist

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed-demo: $(NEEDS) | $(VENV)/bin/python
	$(INSTALL) -e '.[service,workers,msprobe,example]'
	@touch $@

$(VENV)/installed-dev: $(NEEDS) | $(VENV)/bin/python
	$(INSTALL) -e '.[service,workers,msprobe,example,notebook,trl,lightning,trackers,wandb,dev]'
	@touch $@

$(VERL)/bin/python:
	$(PYTHON) -m venv $(VERL)

$(VERL)/installed: $(VERL_NEEDS) | $(VERL)/bin/python
	$(VERL_INSTALL) -e '.[service,workers,msprobe,verl]'
	@touch $@

$(VERL)/installed-dev: $(VERL)/installed
	$(VERL_INSTALL) -e '.[service,workers,msprobe,verl,dev]' pytest-asyncio  # verl's own tests need it
	@touch $@

$(OWN)/installed: $(NEEDS) tests/own_tests/requirements.txt
	$(PYTHON) -m venv $(OWN)
	$(OWN)/bin/python -m pip install --quiet --disable-pip-version-check -c deploy/constraints.txt -e '.[service,workers,example,notebook,trl,trackers,wandb,dev]' -r tests/own_tests/requirements.txt
	@touch $@

$(TRACKERS)/installed: pyproject.toml
	$(PYTHON) -m venv $(TRACKERS)
	$(TRACKERS)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[service,trackers,wandb,trackio,swanlab]' hypothesis jsonschema-rs psutil pytest pytest-timeout pytest-xdist
	@touch $@

$(LOWEST)/bin/python:
	$(PYTHON_LOWEST) -m venv $(LOWEST)

# Not the extras `example` and `dev`: the one wants the newest torch, the other brings linters.
$(LOWEST)/installed: $(LOWEST_NEEDS) | $(LOWEST)/bin/python
	$(LOWEST_INSTALL) -e '.[service,workers,msprobe,notebook]' torch transformers ctranslate2 tensordict hypothesis playwright psutil 'psycopg[binary]' pytest pytest-timeout pytest-xdist
	@touch $@
