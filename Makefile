PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: help env demo test lint type pytest docs bench clean

help:  ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

env: $(INSTALLED)  ## create .venv with the package (editable) and every development extra

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: env  ## train a small Llama, compress it, and write out/demo/report.html
	$(BIN)/python examples/demo

test: lint type pytest docs  ## everything CI runs

lint: env  ## style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: env  ## static types
	$(BIN)/pyright

pytest: env  ## unit tests, examples, documentation, packaging
	$(BIN)/pytest -n 2

docs: env  ## build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

bench: env  ## measure the ops on this machine
	$(BIN)/neuronmm bench overhead
	$(BIN)/neuronmm bench cpu

clean:  ## remove what the other targets made
	rm -rf $(VENV) out site dist .pytest_cache .ruff_cache .hypothesis
