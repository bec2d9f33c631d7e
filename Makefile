# Variables, on the command line or in the environment:
#   TORCH=2.13.0    the torch that is installed           PIP_ARGS=   added to pip install torch, such as --index-url URL
#   PYTHON=python3  the interpreter of the virtual environment, and of `make gpu`
#   PYTEST_ARGS=    added to pytest                       ARGS=       added to benchmarks.run, tools.test_wheel
#   CHROMIUM=       the browser of tests/seeing/test_page.py, if it is not `chromium` on PATH
#   TEXT=           a text file for the demo              OUT=        where results go
#   EMULATOR=all    `make test` runs tests of kernels that have not changed since they were proved, too
#   FULL=1          the demo trains as long as it takes to write well
#   CUDA=0          `make wheel` without the CUDA library
#   PART=bench CASES=...  parts of `make gpu`, and its benchmarks      PREBUILT=1  `make gpu` takes the libraries as they are
#   LIMIT=540       seconds of `make gpu`, after the build
# See setup.py for CXX, CXXFLAGS, MAX_JOBS and CUDA_HOME.
TORCH ?= 2.13.0
PYTHON ?= python3
VENV ?= .venv
ASAN_TESTS ?= tests/attention/test_fuzz.py
CXX ?= g++

PY := $(VENV)/bin/python
PYTEST_ARGS += $(if $(CI),--color=no)
# a process for each core
RUN_TESTS = OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(PY) -m pytest -q -n auto --dist loadfile --no-loadscope-reorder
CXX_FILES = $(shell find csrc tests benchmarks -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')

.DEFAULT_GOAL := build
.PHONY: help build test prove test-quick test-clients demo bench docs wheel test-wheel gpu lint format asan fuzz test-torch test-torches clean
.DELETE_ON_ERROR:

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 12

build: $(VENV)/.torch-$(TORCH)  ## (default) virtual environment with torch, and the libraries in attnjourney/
	@$(PY) setup.py -q build_ext --inplace

test-quick: $(VENV)/.tools build  ## build, then what to run before a commit: some cases of everything, in a minute or two
	$(RUN_TESTS) -m quick $(PYTEST_ARGS)

# Both libraries in one go, then the files of tests in the order of tests/conftest.py: the longest first. One machine code
# is enough for what the tests ask of CUDA kernels without a GPU.
test: $(VENV)/.tools  ## build, then all tests; where nvcc is, the CUDA library is built for them too
	@ATTNJOURNEY_CUDA=1 ATTNJOURNEY_CUDA_CODE=$(or $(ATTNJOURNEY_CUDA_CODE),80) \
		$(PY) setup.py -q build_ext --build-lib build/cuda
	@$(PY) setup.py -q build_ext --inplace
	ATTNJOURNEY_EMULATOR=$(or $(EMULATOR),changed) $(RUN_TESTS) -m "not clients" $(PYTEST_ARGS)

prove: $(VENV)/.tools  ## the emulator's tests that have not passed with the kernels as they are; records those that do
	$(PY) -m tools.prove $(ARGS)

test-clients: $(VENV)/.tools build  ## install what attnjourney.integrations is for, then the tests with it
	$(call install,test-clients)
	@$(PY) -c "import torchvision" 2>/dev/null || { $(PY) -m pip uninstall -q -y torchvision; \
		echo "no torchvision here that loads beside this torch: its tests are skipped"; }
	$(RUN_TESTS) -m clients $(PYTEST_ARGS)

demo: build  ## build, then the demo, in two minutes; longer with FULL=1: make demo TEXT=book.txt
	$(PY) -m examples.demo $(if $(FULL),--full) $(if $(TEXT),--text "$(TEXT)") $(if $(OUT),--out "$(OUT)")

bench: build  ## build, then the benchmarks: make bench ARGS="..."; a dozen cases in two minutes: make bench QUICK=1
	$(PY) -m benchmarks.run $(if $(QUICK),--quick) $(ARGS)

# torch's own libraries are those of the installed torch, never copies.
wheel: OUT := $(or $(OUT),dist)
wheel: $(VENV)/.torch-$(TORCH)  ## sdist and wheel in dist/, for any Linux with glibc >= 2.28; CUDA=0 without the CUDA library
	$(call install,wheel)
	@rm -rf build/wheel
	@$(PY) setup.py -q sdist -d "$(OUT)"
	@$(if $(CUDA),ATTNJOURNEY_CUDA=$(CUDA),$(if $(shell command -v nvcc),ATTNJOURNEY_CUDA=1)) \
		$(PY) -m pip wheel -q --no-deps --no-build-isolation -w build/wheel .
	@PATH="$(abspath $(VENV))/bin:$$PATH" $(PY) -m auditwheel -v repair --plat manylinux_2_28_$(shell uname -m) --only-plat -w "$(OUT)" \
		--exclude 'libtorch*.so' --exclude 'libc10*.so' build/wheel/*.whl 2>build/wheel/log \
		|| { cat build/wheel/log; exit 1; }
	@ls -l "$(OUT)"

test-wheel:  ## the smoke tests with the wheel of dist/, without a compiler, by Python and torch: ARGS="--torch 2.14.1"
	$(PY) -m tools.test_wheel $(ARGS)

docs: build  ## build, then the site of docs/ in build/docs; a warning is an error
	$(call install,docs)
	@$(PY) -m sphinx -q -W --keep-going -b html docs build/docs
	@echo "build/docs/index.html"

# machine code for the GPU that is there alone: compilation is a part of the time
CAPABILITY = 'import torch; print("{}{}".format(*torch.cuda.get_device_capability()))'
gpu: OUT := $(or $(OUT),build/gpu)
gpu:  ## on a machine with a GPU, with PYTHON's own torch: build, then the parts of tools/gpu_parts.py, results in OUT
	@$(PYTHON) -c 'import torch; raise SystemExit(not torch.cuda.is_available())' 2>/dev/null \
		|| { echo "make gpu: $(PYTHON) has no torch that sees a CUDA device (torch.cuda.is_available() is False)"; exit 1; }
	$(if $(PREBUILT),,ATTNJOURNEY_CUDA_CODE=$$($(PYTHON) -c $(CAPABILITY)) $(PYTHON) setup.py -q build_ext --inplace)
	PYTHONPATH="$(CURDIR)" $(PYTHON) -m tools.gpu --out "$(OUT)" --part "$(PART)" --cases "$(CASES)" \
		$(if $(LIMIT),--seconds "$(LIMIT)")

lint: $(VENV)/.tools  ## check the style of C++ and Python, and Python's types
	@$(VENV)/bin/clang-format --dry-run --Werror $(CXX_FILES)
	@$(VENV)/bin/ruff check
	@$(VENV)/bin/ruff format --check
	@$(VENV)/bin/mypy

format: $(VENV)/.tools  ## correct the style of C++ and Python
	@$(VENV)/bin/clang-format -i $(CXX_FILES)
	@$(VENV)/bin/ruff check --fix
	@$(VENV)/bin/ruff format

# Python knows nothing of the sanitizers and of C++ exceptions, so their libraries are loaded before it; capture=sys leaves
# their reports, which end the process, on the terminal.
WITH_SANITIZERS = LD_PRELOAD="$(foreach lib,asan ubsan stdc++,$(realpath $(shell $(CXX) -print-file-name=lib$(lib).so)))" \
	ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 ATTNJOURNEY_LIBRARY_DIR=build/sanitize/attnjourney

asan: $(VENV)/.tools  ## C++ tests with the address and undefined-behaviour sanitizers: make asan ASAN_TESTS="..."
	ATTNJOURNEY_SANITIZE=1 $(PY) setup.py -q build_ext --build-lib build/sanitize
	$(WITH_SANITIZERS) $(PY) -m pytest -q --capture=sys $(ASAN_TESTS) $(PYTEST_ARGS)

# The scalar kernels alone are built with sanitizers, which takes minutes and not a quarter of an hour.
fuzz: $(VENV)/.tools  ## spoilt calls of every operator with sanitizers: make fuzz MINUTES=10 SEED=1
	ATTNJOURNEY_SANITIZE=scalar $(PY) setup.py -q build_ext --build-lib build/sanitize
	$(WITH_SANITIZERS) ATTNJOURNEY_ISA=scalar $(PY) -m tests.support.fuzz --minutes $(or $(MINUTES),10) --seed $(or $(SEED),1)

test-torch: .venv-$(TORCH)/.tools  ## smoke tests of the libraries already built with another torch: TORCH=2.14.1
	@test -e attnjourney/_C_cpu.so || { echo "make test-torch: run make build first"; exit 1; }
	.venv-$(TORCH)/bin/python -m pytest -q -m smoke $(PYTEST_ARGS)

test-torches: build  ## the smoke tests with every torch that pip's index has: the newest of 2.11, 2.12, ...
	$(PY) -m tools.test_torches

clean:  ## remove everything that was built or installed here
	rm -rf .venv .venv-* build dist *.egg-info attnjourney/*.so .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The lists of requirements in pyproject.toml that are named, "build" for those of the build itself.
define REQUIREMENTS
import importlib, sys
toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "pip._vendor.tomli")
with open("pyproject.toml", "rb") as file:
    project = toml.load(file)
lists = project["project"]["optional-dependencies"] | {"build": project["build-system"]["requires"]}
print(*dict.fromkeys(entry for name in sys.argv[1:] for entry in lists[name]), sep="\n")
endef
export REQUIREMENTS

# $(call install,LISTS,ENVIRONMENT=$(VENV)). What is imported first is compiled then: half of pip's time is that of files
# that nobody imports.
install = $(call install_in,$(1),$(or $(2),$(VENV)))
define install_in
@$(2)/bin/python -c "$$REQUIREMENTS" $(1) >$(2)/requirements.txt
@$(2)/bin/python -m pip install -q --no-compile torch==$(TORCH) -r $(2)/requirements.txt
endef

# Marks of completion: torch $(TORCH) with what the build, the demo and the benchmarks ask for, then the tools.
.PRECIOUS: %/.torch-$(TORCH)
%/.torch-$(TORCH): pyproject.toml
	@echo "installing torch $(TORCH) in $*"
	@test -x $*/bin/python || $(PYTHON) -m venv $*
	@$*/bin/python -m pip install -q --no-compile $(PIP_ARGS) torch==$(TORCH)
	$(call install,build demo bench,$*)
	@rm -f $*/.torch-* $*/.tools
	@touch $@

%/.tools: %/.torch-$(TORCH)
	@echo "installing the tools for tests and style in $*"
	$(call install,test lint,$*)
	@touch $@
