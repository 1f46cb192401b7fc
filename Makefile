# Every command of the project. `make` alone lists them.
SHELL := /bin/bash
.DEFAULT_GOAL := help
VENV := .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest
BUDGET ?= 5
KILLS ?= 10
TESTS := tests/unit tests/property tests/integration tests/faults
# Each process has half of the files at first; who is done takes tests over from the other.
BOTH_CORES := -n 2 --dist worksteal
SEED ?=

.PHONY: help setup lock check fix test test-durations test-long test-unit test-servers test-faults sim bench docs demo servers clean

help: ## list the commands
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

$(VENV)/.done: requirements.lock pyproject.toml
	python3 -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/uv pip sync --quiet --python $(BIN)/python requirements.lock
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --editable .
	@touch $@

setup: $(VENV)/.done ## a local .venv with the pinned, hashed requirements

lock: ## write requirements.lock anew from pyproject.toml
	python3 -m venv $(VENV) && $(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip compile --quiet --generate-hashes --no-emit-index-url --no-annotate --extra dev \
	  --python-version 3.11 --output-file requirements.lock pyproject.toml requirements.in

check: setup ## format, lint, types, tidiness
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy icestream
	COLUMNS=100 $(BIN)/python -m docs.reference --check
	$(PYTEST) -q tests/test_tidy.py

fix: setup ## format and mend what can be mended
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

test: setup ## everything a change must pass, set-up included
	@$(BIN)/icestream warm-up tests/warm-up.yaml & warm=$$!; $(MAKE) --no-print-directory check && wait $$warm
	$(PYTEST) -q $(BOTH_CORES) -m "not long" $(TESTS)

test-durations: setup ## the same, and measure the files anew for the order in which they run
	$(PYTEST) -q $(BOTH_CORES) -m "not long" --write-durations $(TESTS)

test-long: setup ## kills of real processes at every place, all random examples, and whatever else takes long
	ICESTREAM_THOROUGH=1 $(PYTEST) -q -m long tests
	ICESTREAM_THOROUGH=1 $(PYTEST) -q -m "not long" tests/property

test-unit: setup ## unit and property tests, no server
	$(PYTEST) -q tests/unit tests/property

test-servers: setup ## tests on real servers; K=name picks some
	$(PYTEST) -q tests/integration $(if $(K),-k $(K))

test-faults: setup ## kill at random for BUDGET minutes, and pipelines of PostgreSQL and Kafka KILLS times
	$(BIN)/python -m tests.faults.rounds --minutes $(BUDGET) $(if $(SEED),--seed $(SEED))
	$(BIN)/python -m tests.faults.kills --kills $(KILLS) $(if $(SEED),--seed $(SEED))
	$(BIN)/python -m tests.faults.kafka_kills --kills $(KILLS) $(if $(SEED),--seed $(SEED))

sim: setup ## simulate the commit protocol for BUDGET minutes; SEED= repeats a run
	$(BIN)/python -m tests.property.simulation --minutes $(BUDGET) $(if $(SEED),--seed $(SEED))

bench: setup ## measure, as ratios within one run
	$(BIN)/python -m bench

docs: setup ## write the reference pages anew
	COLUMNS=100 $(BIN)/python -m docs.reference

demo: setup ## the main job end to end, with embedded parts
	$(BIN)/icestream demo

servers: setup ## start the test servers and say how to reach them
	$(BIN)/python -m tests.servers

clean: ## remove what can be made again
	rm -rf $(VENV) icestream-demo icestream-data .pytest_cache .mypy_cache .ruff_cache
	find icestream -name '*.nb[ic]' -delete
