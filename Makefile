# All set-up happens here: a fresh clone needs python3 (3.11 to 3.13), a C++20 compiler and, for
# CUDA, nvcc. `make gpu` uses the Python it finds, as it is; everything else uses .venv.
PYTHON ?= python3
STREAMLAP_CUDA ?= AUTO
PYTEST_ARGS ?=
BENCH_ARGS ?=
SANITIZERS ?=
MINUTES ?=
SOAK_ARGS ?=
export STREAMLAP_CUDA
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore

VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/ready-$(shell cksum < requirements-dev.txt | cut -d' ' -f1)
EDITABLE := $(VENV)/editable
HOST := build/host
CPP_FILES = find csrc tests/cpp tests/sanitize benches -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh'
CPP_LIST = $(CPP_FILES) 2>/dev/null | sort

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo bench bench-report bench-binary test sanitize soak gpu build build-host lint types \
        format cpp-test py-test wheel clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-13s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

demo: build ## build and run the demo on what this machine has
	$(VENV)/bin/streamlap demo

bench: build ## measure streamlap beside its peers; keep it in benches/results (BENCH_ARGS=--quick)
	$(VENV)/bin/streamlap bench $(BENCH_ARGS)

bench-report: build ## write docs/performance.md from benches/results
	$(VENV)/bin/streamlap bench --report

test: lint types build build-host cpp-test py-test ## lint, types, builds with and without CUDA, tests

sanitize: $(READY) ## C++ and host Python tests under the sanitizers (SANITIZERS="thread address")
	$(PY) tests/sanitize/run.py $(SANITIZERS)

soak: build ## exit, interrupt and thread tests again and again (MINUTES=10, else a hundred rounds)
	$(PY) tests/soak.py $(if $(MINUTES),--minutes $(MINUTES)) $(SOAK_ARGS)

gpu: export STREAMLAP_CUDA := ON
gpu: export STREAMLAP_REQUIRE_GPU := 1
gpu: export CMAKE_CUDA_ARCHITECTURES ?= 90
gpu: ## on a machine with a GPU: build, C++ and GPU tests, mutants, memcheck, demo, in the given PYTHON
	$(PYTHON) setup.py -q build_ext --inplace
	$(PYTHON) -m pip install -q --no-build-isolation --no-deps -e .
	$(PYTHON) setup.py -q ctest
	$(PYTHON) -m pytest tests -m gpu --require-gpu -q $(PYTEST_ARGS)
	$(PYTHON) tests/gpu_memcheck.py --under
	$(PYTHON) tests/gpu_kernels.py
	$(PYTHON) -m streamlap demo
	$(PYTHON) setup.py -q mutants
	$(PYTHON) tests/mutants.py --cuda
	$(PYTHON) tests/python_mutants.py --cuda

build: $(READY) ## build the module in place (STREAMLAP_CUDA=AUTO|ON|OFF)
	$(PY) setup.py -q build_ext --inplace
	@$(PY) -c 'import importlib.util as u, sys; f = u.find_spec("streamlap"); sys.exit(not (f and f.origin == "$(CURDIR)/src/streamlap/__init__.py"))' \
	  || rm -f $(EDITABLE) # something else was installed in its place
	@$(MAKE) -s $(EDITABLE)

build-host: $(READY) ## build the package without CUDA into build/host
	STREAMLAP_CUDA=OFF $(PY) setup.py -q build --build-lib $(HOST)

bench-binary: ## build build/streamlap-bench, in .venv's Python if there is one, else in PYTHON
	$(if $(wildcard $(PY)),$(PY),$(PYTHON)) setup.py -q bench

lint: $(READY) ## check style and format
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(CPP_LIST) | xargs -r $(VENV)/bin/clang-format --dry-run -Werror

types: $(READY) ## check types
	$(PY) -m mypy

format: $(READY) ## rewrite the sources in the project's format
	$(PY) -m ruff check --fix --select I -q .
	$(PY) -m ruff format .
	$(CPP_LIST) | xargs -r $(VENV)/bin/clang-format -i

cpp-test: $(READY) ## C++ tests, with CUDA as asked and without, and the mutation gate
	$(PY) setup.py -q ctest
	STREAMLAP_CUDA=OFF $(PY) setup.py -q ctest
	$(PY) tests/schedules.py --least 1000
	STREAMLAP_CUDA=OFF $(PY) setup.py -q mutants
	$(PY) tests/mutants.py

py-test: build build-host ## Python tests, their mutation gate, and that the module without CUDA loads
	PYTHONPATH=$(HOST) $(PY) -c 'from streamlap import _native as n; assert "$(HOST)" in n.__file__ and n.cuda_reason()'
	$(PY) tests/python_mutants.py
	$(PY) -m pytest -q -rs -n 2 $(PYTEST_ARGS)

wheel: $(READY) ## sdist and wheel into dist/
	$(PY) -m build --no-isolation --sdist --wheel

clean: ## remove what was built, but not .venv
	rm -rf build dist src/*.egg-info src/streamlap/*.so $(EDITABLE)

$(READY): requirements-dev.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
	  { echo '$(PYTHON) is no Python 3.11 to 3.13: set PYTHON=/path/to/python3'; exit 1; }
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	  { echo '$(PYTHON) cannot make virtual environments: install its venv package' \
	         '(on Debian, python3-venv) or set PYTHON=/path/to/python3'; exit 1; }
	$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(PY) -m pip install -q -r requirements-dev.txt
	@rm -f $(VENV)/ready-* && touch $@

$(EDITABLE): pyproject.toml setup.py src/streamlap/_version.py $(READY)
	$(PY) -m pip install -q --no-build-isolation --no-deps -e .
	@touch $@
