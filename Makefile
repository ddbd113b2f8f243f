PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LOGGERS := .venv-loggers
TRANSFORMERS4 := .venv-transformers4

.PHONY: env train test test-long test-loggers transcripts parity faults nodes export gpu gpu-kit mutants slips lock lint types check clean

env: $(VENV)/.installed

PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

# install what `train` needs; `env` adds what the other targets need
$(VENV)/.core: pyproject.toml .constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) -c .constraints.txt -e .
	touch $@

# LOCKED=1 installs the archives that CI installs and checks their hashes (CPython 3.11, x86-64 Linux, torch for CPUs)
$(VENV)/.installed: pyproject.toml .constraints.txt .ci/all.lock .ci/build.lock
	$(PYTHON) -m venv $(VENV)
ifdef LOCKED
	$(PIP) --require-hashes --no-deps -r .ci/build.lock
	$(PIP) --require-hashes --no-deps --no-build-isolation -r .ci/all.lock
	$(PIP) --no-deps --no-build-isolation -e .
else
	$(PIP) -c .constraints.txt -e '.[dev]'
	# timm requires torchvision, whose wheel does not work with a CPU build of torch. The tests need one file of timm
	$(PIP) --no-deps timm==1.0.31
endif
	touch $(VENV)/.core $@

train: $(VENV)/.core
	$(BIN)/bert-dp train

# the quick tests, including one parity test per engine, one killed run and one resumed run. Two test files run at a
# time, because starting processes keeps at most one core busy
test: env
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow"

# the rest of the tests
test-long: env
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m slow

# test the logging services with their real packages, offline, in a separate environment
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

# record the transcripts of all verbs again; review the diff
transcripts: env
	$(BIN)/python -m tests.transcripts --record

# write the lists of packages and hashes that CI installs, from .constraints.txt
lock: env
	$(BIN)/python .ci/lock.py

# run every cell of the parity matrix; after an interruption, resume from .parity/results.jsonl
parity: env
	$(BIN)/python -m tests.parity.matrix

# run all rounds of the table of faults, which takes hours; after an interruption, resume from .faults/results.jsonl
faults: env
	$(BIN)/python -m tests.faults

# run all rounds of the tests on several nodes, simulated by namespaces of this machine (about an hour; needs root,
# iproute2 and bindfs)
nodes: env
	BERT_DP_NODES=10 $(BIN)/python -m pytest --timeout 3600 tests/nodes

# export every configuration at full size in every format and load it with transformers 5 and 4.57; after an
# interruption, resume from .export/results.jsonl
export: env $(TRANSFORMERS4)/.installed
	nice $(BIN)/python -m tests.export_all --transformers4 $(TRANSFORMERS4)/bin/python

# environment that loads a directory of `export hf` without bert-dp, with the last transformers before version 5
$(TRANSFORMERS4)/.installed: .constraints.txt
	$(PYTHON) -m venv $(TRANSFORMERS4)
	$(TRANSFORMERS4)/bin/python -m pip install --quiet --disable-pip-version-check \
		$$(grep -E '^(torch|numpy|safetensors)==' .constraints.txt) 'transformers>=4.57,<5'
	touch $@

# check that this machine's GPUs train correctly, and measure their speed; after an interruption, resume from
# .gpu/results.jsonl
gpu: env
	$(BIN)/python -m tests.gpu

# make the folder .gpukit for a GPU machine without network (tests/gpu/offline.sh): make gpu-kit DATA="FILE or DIR..."
gpu-kit: env
	bash tests/gpu/make_kit.sh $(DATA)

# show which seeded bugs the tests detect, which takes hours: `mutants` makes small changes to the pure modules with
# mutmut; `slips` applies hand-written bugs to the other modules
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
