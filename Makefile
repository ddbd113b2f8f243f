PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: env train test parity faults lint types check clean

env: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml .constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c .constraints.txt -e '.[dev]'
	# timm asks for torchvision, whose wheel does not fit a CPU torch; the tests need one file of it
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps timm==1.0.31
	touch $@

train: env
	$(BIN)/bert-dp train

test: env
	$(BIN)/python -m pytest

# every cell of the parity matrix; goes on where it was stopped (.parity/results.jsonl)
parity: env
	$(BIN)/python -m tests.parity.matrix

# the fault table with its full counts (hours); goes on where it was stopped (.faults/results.jsonl)
faults: env
	$(BIN)/python -m tests.faults

lint: env
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: env
	$(BIN)/mypy

check: lint types test

clean:
	rm -rf $(VENV) .parity .faults .pytest_cache .mypy_cache .ruff_cache
