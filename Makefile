# make demo    answer a prompt with a real model; PROMPT='...' and ARGS='--keep=4' change what it does
# make test    the whole test suite
# make lint    ruff and pyright
# Each first installs what it needs, and no more, into an environment of its own; `make clean` removes that.

PYTHON ?= python3
VENV ?= .venv
PROMPT ?= Explain in two sentences why the sky is blue.
ARGS ?=
JOBS ?= 3

# As an environment variable, and never expanded, a prompt may hold any text: quotes, dollars, backslashes.
override PROMPT := $(value PROMPT)
export PROMPT

MAKE_ENV = $(PYTHON) scripts/make_env.py "$(VENV)"

.PHONY: demo test lint clean

demo:
	@$(MAKE_ENV)
	@"$(VENV)/bin/vramjax" --model=demo --prompt="$$PROMPT" $(ARGS)

test:
	@$(MAKE_ENV) test
	@"$(VENV)/bin/python" -m pytest --numprocesses=$(JOBS) $(ARGS)

lint:
	@$(MAKE_ENV) lint plot test
	@"$(VENV)/bin/ruff" check .
	@"$(VENV)/bin/ruff" format --check .
	@"$(VENV)/bin/pyright" --pythonpath "$(VENV)/bin/python"

clean:
	@if [ -f "$(VENV)/vramjax-ready" ]; then rm -rf "$(VENV)"; fi
