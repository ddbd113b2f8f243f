PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LOGGERS := .venv-loggers
TRANSFORMERS4 := .venv-transformers4

.PHONY: env train test test-long test-loggers transcripts parity faults nodes export gpu gpu-kit mutants slips lock lint types check clean

env: $(VENV)/.installed

PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

# what `train` needs; `env` adds what the other targets need
$(VENV)/.core: pyproject.toml .constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) -c .constraints.txt -e .
	touch $@

# LOCKED=1 installs what CI installs, every archive checked by its hash (CPython 3.11, x86-64 Linux, torch for CPUs)
$(VENV)/.installed: pyproject.toml .constraints.txt .ci/all.lock .ci/build.lock
	$(PYTHON) -m venv $(VENV)
ifdef LOCKED
	$(PIP) --require-hashes --no-deps -r .ci/build.lock
	$(PIP) --require-hashes --no-deps --no-build-isolation -r .ci/all.lock
	$(PIP) --no-deps --no-build-isolation -e .
else
	$(PIP) -c .constraints.txt -e '.[dev]'
	# timm asks for torchvision, whose wheel does not fit a CPU torch; the tests need one file of it
	$(PIP) --no-deps timm==1.0.31
endif
	touch $(VENV)/.core $@

train: $(VENV)/.core
	$(BIN)/bert-dp train

# what a contributor runs: the quick tests, one parity cell an engine, one kill, one resume; two files at a
# time, as processes that start keep one core busy at most
test: env
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow"

# the rest of the tests
test-long: env
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m slow

# the services that records go to, their real packages, offline; an environment of their own
test-loggers: $(LOGGERS)/.installed
	$(LOGGERS)/bin/python -m pytest -m loggers tests/loggers

PIP_LOGGERS := $(LOGGERS)/bin/python -m pip install --quiet --disable-pip-version-check

$(LOGGERS)/.installed: pyproject.toml .constraints.txt .ci/loggers.lock .ci/build.lock
	$(PYTHON) -m venv $(LOGGERS)
ifdef LOCKED
	$(PIP_LOGGERS) --require-hashes --no-deps -r .ci/build.lock -r .ci/loggers.lock
	$(PIP_LOGGERS) --no-deps --no-build-isolation -e .
else
	$(PIP_LOGGERS) -c .constraints.txt -e '.[tensorboard,wandb,mlflow,trackio]' hypothesis pytest pytest-timeout
endif
	touch $@

# one transcript a verb, recorded anew: review the diff
transcripts: env
	$(BIN)/python -m tests.transcripts --record

# the hashed lists of what CI installs, from .constraints.txt
lock: env
	$(BIN)/python .ci/lock.py

# every cell of the parity matrix; goes on where it was stopped (.parity/results.jsonl)
parity: env
	$(BIN)/python -m tests.parity.matrix

# the fault table with its full counts (hours); goes on where it was stopped (.faults/results.jsonl)
faults: env
	$(BIN)/python -m tests.faults

# several nodes in namespaces of this machine, with the full counts (about an hour; needs root, iproute2, bindfs)
nodes: env
	BERT_DP_NODES=10 $(BIN)/python -m pytest --timeout 3600 tests/nodes

# every configuration at full size in every format, loaded by transformers 5 and 4.57; goes on where it was
# stopped (.export/results.jsonl)
export: env $(TRANSFORMERS4)/.installed
	nice $(BIN)/python -m tests.export_all --transformers4 $(TRANSFORMERS4)/bin/python

# what loads a directory of `export hf` without our code, with the last transformers before 5
$(TRANSFORMERS4)/.installed: .constraints.txt
	$(PYTHON) -m venv $(TRANSFORMERS4)
	$(TRANSFORMERS4)/bin/python -m pip install --quiet --disable-pip-version-check \
		$$(grep -E '^(torch|numpy|safetensors)==' .constraints.txt) 'transformers>=4.57,<5'
	touch $@

# check that this machine's GPUs train correctly and measure them; goes on where it was stopped (.gpu/results.jsonl)
gpu: env
	$(BIN)/python -m tests.gpu

# the folder .gpukit for a GPU machine without network, see tests/gpu/offline.sh: make gpu-kit DATA="FILE or DIR..."
gpu-kit: env
	bash tests/gpu/make_kit.sh $(DATA)

# what the tests notice: small changes of the pure modules by tool, slips in the others by hand (hours)
mutants: env
	$(PIP) -c .constraints.txt -e '.[mutants]'
	nice $(BIN)/python -m tests.mutants --json .mutants.json

slips: env
	nice $(BIN)/python -m tests.slips

lint: env
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: env
	$(BIN)/mypy

check: lint types test test-long

clean:
	rm -rf $(VENV) $(LOGGERS) $(TRANSFORMERS4) .parity .faults .export .gpu .gpukit .mutants.json .pytest_cache .mypy_cache .ruff_cache
