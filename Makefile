# make demo    answer a prompt with a real model; PROMPT='...' and ARGS='--keep=4' change what it does
# make test    the whole test suite
# make lint    ruff and pyright
# Each makes the environment that it needs first; `make clean` removes it.

PYTHON ?= python3
VENV ?= .venv
PROMPT ?= Explain in two sentences why the sky is blue.
ARGS ?=
JOBS ?= 2

.PHONY: demo test lint clean env

demo: env
	@$(VENV)/bin/vramjax --model=demo --prompt='$(PROMPT)' $(ARGS)

test: env
	@$(VENV)/bin/python -m pytest --numprocesses=$(JOBS) $(ARGS)

lint: env
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python

env:
	@$(PYTHON) scripts/make_env.py $(VENV) test lint plot

clean:
	rm -rf $(VENV)
