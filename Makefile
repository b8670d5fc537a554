# Everything runs in a virtual environment beside this file, made with nothing but Python 3.11+ and pip.

PYTHON  ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV    ?= .venv
# More than there are cores, because most tests wait for processes, servers and clocks more than they compute.
WORKERS ?= 4
SECONDS ?= 600
PEERS   ?=
NAMES   ?= $(basename $(notdir $(wildcard requirements-agents-oldest/*.txt)))
ARGS    ?=

# Tests with a cluster of their own: one process runs them, so that there is one cluster at a time.
CLUSTERS := tests/executors/test_ray.py tests/executors/test_dask.py

# Rooms of src/keepstep, and the share of their lines and branches that the tests must reach, in percent.
ROOMS   := kernel engine stores
REACHED := 90

BIN     := $(VENV)/bin
PIP     := $(BIN)/python -m pip install --quiet --disable-pip-version-check

# Tests start hundreds of processes. Without bytecode on the disk, each of them would compile the package again.
test nightly coverage: export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help demo test test-all agents-extra agents-oldest nightly check format coverage bench sim mutants soak fuzz dist clean

help:  ## show this
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(VENV)/.runtime  ## watch a workflow be killed and go on where it was
	@$(BIN)/keepstep demo $(ARGS)

test: $(VENV)/.dev $(VENV)/.browser  ## run the tests (WORKERS=4, ARGS="-k name")
	@$(BIN)/python -m tests.simulation.seeds
	$(BIN)/python -m pytest -n $(WORKERS) $(or $(ARGS),$(CLUSTERS:%=--ignore=%))
	$(if $(ARGS),,$(BIN)/python -m pytest $(CLUSTERS))

test-all:  ## run the tests on every Python from 3.11 on that is found
	@found=; .ci/pythons | { while read -r version python; do found=1; echo "== Python $$version"; \
		$(MAKE) --no-print-directory test VENV=.venv-$$version PYTHON="$$python" </dev/null || exit 1; done; \
		test -n "$$found" || { echo "no Python 3.11 or newer was found" >&2; exit 1; }; }

agents-extra:  ## test recipes for frameworks in environments of their own (ARGS=crewai)
	@for name in $(or $(ARGS),$(basename $(notdir $(wildcard requirements-agents-extra/*.txt)))); do \
		echo "== $$name"; venv=.venv-agents-$$name; \
		{ test -x $$venv/bin/python || $(PYTHON) -m venv $$venv; } \
		&& $$venv/bin/python -m pip install --quiet --disable-pip-version-check \
			--requirement requirements-agents-extra/$$name.txt \
		&& PYTHONPATH=src $$venv/bin/python -m pytest -q tests/agents/test_other_frameworks.py || exit 1; done

nightly: $(VENV)/.dev  ## run every test there is, then sim, mutants, soak and fuzz (SECONDS=600 each): about two hours
	@$(BIN)/python -m tests.simulation.seeds
	KEEPSTEP_NIGHTLY=1 TMPDIR="$${TMPDIR:-/tmp}" $(BIN)/python -m pytest -n $(WORKERS) -m "" $(or $(ARGS),$(CLUSTERS:%=--ignore=%))
	$(if $(ARGS),,KEEPSTEP_NIGHTLY=1 TMPDIR="$${TMPDIR:-/tmp}" $(BIN)/python -m pytest -m "" $(CLUSTERS))
	$(MAKE) --no-print-directory agents-oldest sim mutants soak fuzz ARGS=

agents-oldest: $(VENV)/.dev  ## test adapters with the oldest supported frameworks, then upgrade open runs (NAMES="pydantic_ai")
	@for name in $(NAMES); do echo "== $$name" && $(MAKE) --no-print-directory $(VENV)-oldest-$$name/.oldest && \
		$(VENV)-oldest-$$name/bin/python -m pytest -n $(WORKERS) -m "" tests/agents/test_$$name.py && \
		$(BIN)/python -m tests.agents.upgrade $$name $(VENV)-oldest-$$name/bin/python || exit 1; done

check: $(VENV)/.dev  ## lint, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev  ## format, and mend what the linter can mend
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

coverage: $(VENV)/.dev  ## run the tests and show what they did not reach; fails below 90 % of kernel, engine or stores
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -n $(WORKERS) $(ARGS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --show-missing --skip-covered
	@low=; for room in $(ROOMS); do \
		reached=$$($(BIN)/coverage report --format=total --precision=1 --include="*/keepstep/$$room/*"); \
		echo "$$room: $$reached %"; \
		awk "BEGIN { exit $$reached < $(REACHED) }" || low="$$low $$room"; done; \
	test -z "$$low" || { echo "below $(REACHED) %:$$low" >&2; exit 1; }

bench: $(VENV)/.dev  ## measure (PEERS=1: beside other libraries)
	$(BIN)/python -m bench $(if $(PEERS),--peers) $(ARGS)

sim: $(VENV)/.dev  ## play simulated histories for SECONDS=600 (ARGS="--only SEED")
	$(BIN)/python -m tests.simulation --seconds $(SECONDS) --jobs $(WORKERS) $(ARGS)

mutants: $(VENV)/.dev  ## break the engine on purpose, in many ways, and see the simulation find each
	$(BIN)/python -m tests.simulation.mutants --jobs $(WORKERS) $(ARGS)

soak: $(VENV)/.dev  ## crash and recover for SECONDS=600, then a fleet for as long, then replay random programs for a third of that
	$(BIN)/python -m tests.soak --seconds $(SECONDS) $(ARGS)
	$(BIN)/python -m tests.fleet --seconds $(SECONDS)
	$(BIN)/python -m tests.replay.ways --seconds $$(( $(SECONDS) / 3 ))

fuzz: $(VENV)/.fuzz  ## fuzz every parser for SECONDS=600 (ARGS="value record": only these)
	$(BIN)/python -m tests.fuzz --seconds $(SECONDS) $(ARGS)

dist: $(VENV)/.dev  ## build sdist, wheel and SBOM of the newest commit into dist/, checked on every Python that is found
	$(BIN)/python -m tests.release $(ARGS)

clean:  ## remove everything that can be made again
	rm -rf .venv .venv-* build dist .coverage .coverage.* .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps are newer than what they were made from, so that nothing is installed twice.

$(VENV)/.dev: $(VENV)/.runtime requirements-dev.txt requirements-agents.txt
	@echo "installing what development needs into $(VENV)"
	@$(PIP) --requirement requirements-dev.txt --requirement requirements-agents.txt
	@touch $@

# Tests of the pages drive Chromium. Without it they are skipped, and say so.
$(VENV)/.browser: | $(BIN)/python
	@command -v chromium >/dev/null || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null \
		&& echo "installing chromium" && apt-get update -qq \
		&& DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null; } \
		|| echo "chromium is not installed; tests of the pages will be skipped"
	@touch $@

# Of what tests need, as little as possible: the rest has frameworks and their versions of its own.
$(VENV)-oldest-%/.oldest: requirements-agents-oldest/%.txt requirements-dev.txt pyproject.toml | $(BIN)/python
	@$(BIN)/python -m venv $(@D)
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --requirement $< --editable . \
		$$(grep -E '^(cryptography|hypothesis|psycopg|pytest|uvloop)' requirements-dev.txt)
	@touch $@

$(VENV)/.fuzz: $(VENV)/.dev requirements-fuzz.txt
	@$(PIP) --requirement requirements-fuzz.txt
	@touch $@

$(VENV)/.runtime: pyproject.toml | $(BIN)/python
	@echo "installing keepstep into $(VENV)"
	@$(PIP) --editable .
	@touch $@

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Keepstep needs Python 3.11 or newer; make it known with PYTHON=path" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
		echo "this Python cannot make virtual environments (on Debian: install python3-venv)" >&2; exit 1; }
