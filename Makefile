# Two commands on a fresh machine, each alone: `make serve` and `make test`.
#
#   PYTHON=python3.12            the interpreter that makes .venv (3.11 or later)
#   TORCH_INDEX_URL=URL          where torch comes from, for a CPU-only build for example
#   MODEL=path  ARGS="--port 9"  what `make serve` serves, and flags for it

PYTHON ?= python3
TORCH_INDEX_URL ?=
MODEL ?= smollm2
ARGS ?=
SOAK_SECONDS ?= 600

VENV := .venv
BIN := $(VENV)/bin
INPUTS := pyproject.toml constraints.txt $(wildcard hatch_build.py) scripts/install $(wildcard src/tritium/llm/kernels/cpu/*.cpp src/tritium/llm/kernels/cpu/*.h src/tritium/llm/kernels/cpu/build.py)

.PHONY: serve test install check bench soak clean
.DEFAULT_GOAL := serve

serve: $(VENV)/.installed
	@exec $(BIN)/tritium serve $(MODEL) $(ARGS)

install: $(VENV)/.installed

test: $(VENV)/.installed-dev
	@scripts/test

check: $(VENV)/.installed-dev
	@scripts/check

bench: $(VENV)/.installed
	@for workload in A B C D E kv; do $(BIN)/tritium bench $$workload --model $(MODEL) $(ARGS) || exit 1; echo; done

soak: $(VENV)/.installed-dev
	@$(BIN)/python -m scripts.soak --seconds $(SOAK_SECONDS) $(ARGS)

$(VENV)/.installed: $(INPUTS)
	@PYTHON="$(PYTHON)" TORCH_INDEX_URL="$(TORCH_INDEX_URL)" scripts/install

$(VENV)/.installed-dev: $(VENV)/.installed
	@PYTHON="$(PYTHON)" scripts/install dev

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	rm -f src/tritium/llm/kernels/cpu/libtritium_*so
