# `make help` lists what there is. Everything runs in an environment that `make setup` keeps in
# .venv/; VENV= names one to use as it is, PYTHON= the interpreter that a new one is made with.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory
# Tests share two cores and one environment: no two recipes at once.
.NOTPARALLEL:

PYTHON ?= python3
export VENV
export CARGO_TERM_PROGRESS_WHEN ?= auto

# Asked when a recipe runs, so that `make help` and `make clean` need no environment.
PY = $(shell $(PYTHON) scripts/env.py path)/bin/python
# pyo3's build script asks an interpreter: let it be ours. Nothing is linked with libpython, which
# many interpreters come without.
CARGO = PYO3_PYTHON="$(PY)" PYO3_BUILD_EXTENSION_MODULE=1 cargo
PYTHON_CODE := $(wildcard python tests examples scripts benches)
PYTEST_FOLDERS := $(wildcard tests/unit tests/conformance tests/stateful tests/model tests/cuda)

.PHONY: help setup demo test bench check wheel gpu compat soak clean
.PHONY: test-rust test-python test-vllm test-wheel check-rust check-python installed

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s%s\n", $$1, $$2 }' Makefile

setup: ## make the environment in .venv/ (vLLM on CPU, nvcc and the tools; 7 GB, some minutes, once)
	@command -v "$(PYTHON)" >/dev/null || \
		{ echo "setup: $(PYTHON) is missing: install Python 3.11 or newer, or name one with PYTHON=" >&2; exit 1; }
	@$(PYTHON) scripts/env.py setup

demo: setup ## ask a real model in a real vLLM about a long text, with the cache cold and warm
	@"$(PY)" scripts/wheel.py install release
	@"$(PY)" examples/demo.py

test: test-rust test-python test-vllm test-wheel ## run all tests, vLLM's end-to-end ones included

# PyPI's nvcc is among what `make setup` installs, so where the environment is our own the kernels must
# compile from it alone; an environment that VENV names may lack it.
test-rust: setup ## the Rust tests alone
	LMCACHE_RS_PACKAGED_NVCC="$(if $(VENV),,required)" $(CARGO) test --workspace --locked
	@# Each wait between streams left out once: the torn bytes must be seen.
	$(CARGO) test --locked -p lmcache-transfer --features planted-removals --test cuda_waits
	@# Every interleaving that matters of the store's own code, and a planted fault that must be seen.
	RUSTFLAGS="--cfg lmcache_loom" $(CARGO) test --locked -p lmcache-memory --test loom --release \
		--target-dir "$${CARGO_TARGET_DIR:-target}/loom"

test-python: installed ## the Python tests that need no engine
	"$(PY)" -m pytest $(PYTEST_FOLDERS) --durations=10

test-vllm: installed ## the end-to-end tests: a real vLLM on its CPU backend
	"$(PY)" scripts/e2e.py

test-wheel: setup ## what is in the wheel, and what installing it changes
	"$(PY)" scripts/check_wheel.py

# Never in CI: a figure of a shared machine says little.
bench: setup ## measure every limit (some minutes, a quiet machine); LINES="hash lookup", QUICK=1
	@"$(PY)" scripts/wheel.py install release
	@"$(PY)" benches/run.py $(if $(QUICK),--quick) $(LINES)

check: check-rust check-python ## formats, lints, types, and the stub against the extension

check-rust: setup
	cargo fmt --all --check
	$(CARGO) clippy --workspace --all-targets --locked -- -D warnings
	@# The benches are a workspace of their own, whose lock must follow the crates'.
	$(CARGO) metadata --locked --format-version 1 --manifest-path benches/rust/Cargo.toml >/dev/null

check-python: installed
	"$(PY)" -m ruff format --check $(PYTHON_CODE)
	"$(PY)" -m ruff check $(PYTHON_CODE)
	"$(PY)" -m mypy
	"$(PY)" -m mypy.stubtest lmcache_rs._native

wheel: setup ## build the release wheel into dist/
	@"$(PY)" scripts/wheel.py build release
	@ls -sh dist/*.whl

# The wheel that tests use: optimised, with every debug assertion on.
installed: setup
	@"$(PY)" scripts/wheel.py install checked

clean: ## remove what was built, and the environments
	rm -rf .venv dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	cargo clean

# GPU_PYTHON= names a Python with a torch that has CUDA and this package; the environment's torch has not.
# GPU_OTHER_PYTHON= names one with another torch and the same wheel.
gpu: setup ## run what needs a GPU, eight minutes at most; one line where there is none
	@"$(or $(GPU_PYTHON),$(PY))" tests/gpu/run.py $(if $(IMITATED),--imitated) \
		$(if $(GPU_OTHER_PYTHON),--other "$(GPU_OTHER_PYTHON)") --json gpu.json

# Never in CI: an environment of its own, made once.
compat: installed ## run what needs vLLM on the older release that README names
	@"$(PY)" scripts/compat.py

# Prompts, and how often each of them is asked.
SOAK ?= 200x64

# Long, and never in CI: every end-to-end test with copies layer by layer, of which `make test` runs
# a choice (tests/vllm/test_layerwise.py), traffic under constant eviction (tests/vllm/test_soak.py),
# pipeline stages that vLLM compiles and replicas behind a server (tests/vllm/test_parallel.py),
# data races under ThreadSanitizer, disks whose writers die, and ten times the schedules.
soak: installed ## the long tests: layer by layer, traffic for hours, races, 10^5 schedules, disks
	"$(PY)" scripts/races.py
	KV_TEST_LAYERWISE=1 "$(PY)" scripts/e2e.py
	KV_TEST_SOAK=$(SOAK) "$(PY)" -m pytest tests/vllm/test_soak.py tests/vllm/test_parallel.py \
		--timeout=14400 -s
	MODEL_SCHEDULES=100000 "$(PY)" -m pytest tests/model/test_schedules.py
	CUDA_SUITES=all "$(PY)" -m pytest tests/cuda
	@# A thousand kills, ten thousand power cuts, and a minute of writers at the limit.
	$(CARGO) test --locked -p lmcache-storage --test local_disk_faults -- --ignored --test-threads 1 </dev/null

