PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# torch_xla 2.9.0 loads with torch 2.9.x alone, so it has an environment of its own.
XLA_VENV := .venv-xla
XLA_BIN := $(XLA_VENV)/bin
XLA_INSTALLED := $(XLA_VENV)/.installed
# vLLM pins numpy, Transformers and much else, so it has one, too.
VLLM_VENV := .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_INSTALLED := $(VLLM_VENV)/.installed
# NxD Inference and optimum-neuron want Transformers 4.57: an environment without our extra hf.
ENGINES_VENV := .venv-engines
ENGINES_INSTALLED := $(ENGINES_VENV)/.installed
# Where `python tests/engines/sources/checkouts.py DIR` finds the engines' public sources.
SOURCES := out/sources
# A file's tests share their models and builds, so one process runs them all.
# In the order of the folders: sorted by their number of tests, the longest files would come last.
# Bytecode is kept: each process that tests start would compile our sources anew, for half a second.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder
# What oneDNN, torch and MKL obey: a CPU with bf16 units then computes as one without.
AVX2 := ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2

.PHONY: help plans env xla-env vllm-env engines-env demo results results-data test test-fast test-avx2 lint type pytest test-xla test-vllm test-engines docs floors ceilings faults bench house csrc clean

help:  ## list the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

env: $(INSTALLED)  ## create .venv with the package (editable) and every development extra

$(INSTALLED): pyproject.toml neuroncore/pyproject.toml constraints.txt
	@echo "Installing into $(VENV): a few minutes, most of them for torch"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ./neuroncore -e '.[dev]'
	touch $@

xla-env: $(XLA_INSTALLED)  ## create .venv-xla with torch 2.9.0 and torch_xla 2.9.0, for the CPU

# --no-deps: the CUDA packages that torch (and accelerate, by way of it) would bring take 5 GB;
# stand-ins are built instead.
# torch<0: pip stops at a requirement that requires torch, before it brings CUDA.
$(XLA_INSTALLED): pyproject.toml neuroncore/pyproject.toml constraints.txt tests/xla/requirements.txt tests/xla/cuda_stand_ins.py
	$(PYTHON) -m venv $(XLA_VENV)
	sed 's/^torch==.*/torch<0/' constraints.txt > $(XLA_VENV)/constraints.txt
	$(XLA_BIN)/pip install --quiet --disable-pip-version-check --no-compile \
		-c $(XLA_VENV)/constraints.txt -r tests/xla/requirements.txt
	$(XLA_BIN)/pip install --quiet --disable-pip-version-check --no-compile \
		--no-deps torch==2.9.0 torch_xla==2.9.0 $$(grep '^accelerate==' constraints.txt) -e ./neuroncore -e .
	$(XLA_BIN)/python tests/xla/cuda_stand_ins.py
	touch $@

vllm-env: $(VLLM_INSTALLED)  ## create .venv-vllm with vLLM 0.32.0 for the CPU: 3 GB

# Where the index has no torch 2.13.0+cpu:
# PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make vllm-env
$(VLLM_INSTALLED): pyproject.toml neuroncore/pyproject.toml tests/vllm/requirements.txt tests/vllm/distribution.py
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_BIN)/pip install --quiet --disable-pip-version-check --no-compile \
		--no-deps -r tests/vllm/requirements.txt -e ./neuroncore -e .
	$(VLLM_BIN)/python tests/vllm/distribution.py
	touch $@

engines-env: $(ENGINES_INSTALLED)  ## create .venv-engines with torch and Transformers 4.57, for the engines' public sources

$(ENGINES_INSTALLED): pyproject.toml neuroncore/pyproject.toml constraints.txt tests/engines/sources/requirements.txt
	$(PYTHON) -m venv $(ENGINES_VENV)
	$(ENGINES_VENV)/bin/pip install --quiet --disable-pip-version-check --no-compile \
		$$(grep '^torch==' constraints.txt) -r tests/engines/sources/requirements.txt -e ./neuroncore -e .
	touch $@

# Threads that spin while they wait take the cores from one another: beside ten busy processes a
# training step takes 2.5 s with this setting and 10 s without.
demo: env  ## train a small Llama, compress it, and write out/demo/report.html
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python examples/demo

results: env  ## write docs/results.md, its plots, the gallery and the README's numbers: seconds
	$(BIN)/python examples/results

# Needs what make demo writes. Measured data sets want a machine that does nothing else;
# DATA="cpu generate" runs these alone.
results-data: env  ## run the commands that the results come from: an hour
	$(BIN)/python examples/results --data $(DATA)

plans: env  ## trace the plans of plan/plans.json again and search those that changed: minutes
	$(BIN)/python benchmarks/plans.py

test: lint type pytest test-xla test-vllm docs  ## everything: style, types, tests, engines, documentation

test-fast: env  ## for the inner loop: tests that build, install and compile nothing
	$(PYTEST) -m "not slow"

test-avx2: env  ## ops, layers and the demo as on a CPU without bf16 units
	@if grep -qE 'avx512|amx' /proc/cpuinfo; then $(AVX2) $(PYTEST) tests/ops tests/nn \
		tests/test_examples.py::test_demo_makes_its_report_and_uses_its_cache; \
	else echo "This CPU has no units beyond AVX2: make pytest runs these tests so"; fi

lint: env  ## style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: env  ## static types
	$(BIN)/pyright

pytest: env  ## unit tests, examples, documentation, packaging
	$(PYTEST)

# Bytecode is kept: each of the processes would compile torch's sources anew, for 10 s.
test-xla: xla-env  ## lowering through torch_xla, on XLA's CPU client
	PYTHONDONTWRITEBYTECODE= PJRT_DEVICE=CPU $(XLA_BIN)/pytest -n 2 tests/xla

# A server is three processes, each of which imports torch and vLLM: bytecode is kept here, too.
test-vllm: vllm-env  ## serving with vLLM on the CPU: offline, and by its server
	PYTHONDONTWRITEBYTECODE= VLLM_CPU_KVCACHE_SPACE=1 $(VLLM_BIN)/pytest -n 2 --dist loadfile tests/vllm

test-engines: env engines-env  ## this package inside the engines' public sources: make test-engines SOURCES=DIR
	$(BIN)/python tests/engines/sources $(SOURCES)

docs: env  ## build both sites of the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet -f neuroncore/mkdocs.yml

# Environments are removed before they are made: they ask the index each time, and take 2 GB each.
# Bytecode is kept here, too.
floors:  ## every command with the lowest versions that pyproject.toml allows, in .venv-lowest
	$(PYTHON) tests/versions/environment.py lowest .venv-lowest
	PYTHONDONTWRITEBYTECODE= .venv-lowest/bin/pytest tests/cli/test_cli_every_command.py

ceilings:  ## every command, op and division with the newest versions on the index, in .venv-highest
	$(PYTHON) tests/versions/environment.py highest .venv-highest
	PYTHONDONTWRITEBYTECODE= .venv-highest/bin/pytest -n 2 tests/cli/test_cli_every_command.py \
		tests/ops tests/nn tests/csrc tests/hf/test_fused_decoder.py tests/hf/test_tensor_parallel.py

faults: env  ## 1,000 faults, each in a process of its own: a table of what is clean, half an hour
	$(BIN)/python tests/faults

bench: env  ## measure the ops on this machine
	$(BIN)/python benchmarks overhead
	$(BIN)/neuronmm bench cpu

house: env  ## print the sizes and times that bound this repository
	$(BIN)/python tests/house.py

csrc: env  ## build the C++ ops into build/csrc (needs g++)
	$(MAKE) --no-print-directory -j2 -C csrc_stub PYTHON=$(abspath $(BIN)/python)

clean:  ## remove what the other targets made
	rm -rf $(VENV) $(XLA_VENV) $(VLLM_VENV) $(ENGINES_VENV) .venv-lowest .venv-highest build out site dist .pytest_cache .ruff_cache .hypothesis
