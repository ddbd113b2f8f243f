PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: env train test parity lint types check clean

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

lint: env
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: env
	$(BIN)/mypy

check: lint types test

clean:
	rm -rf $(VENV) .parity .pytest_cache .mypy_cache .ruff_cache
