PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: env train test lint types check clean

env: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml .constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c .constraints.txt -e '.[dev]'
	touch $@

train: env
	$(BIN)/bert-dp train

test: env
	$(BIN)/python -m pytest

lint: env
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: env
	$(BIN)/mypy

check: lint types test

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
