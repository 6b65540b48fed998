# What a newcomer needs: `make demo` and `make test`. Both make their environment first.

VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -q
# torch goes first and by itself: left to a resolver, its default build pulls gigabytes of CUDA.
TORCH := torch==2.13.0
DEMO_RUN ?= hello
# Two files of tests at a time: most of them wait for processes they have started.
PYTEST ?= -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: demo examples test check lock clean help
.DEFAULT_GOAL := help

help:
	@echo "make demo      train the hello-world agent and draw its learning curve (no GPU, 2 minutes)"
	@echo "make examples  train every example in turn, and print times and held-out success"
	@echo "make test      lint, type-check and test"
	@echo "make lock      pin requirements/ anew from pyproject.toml"
	@echo "make clean     remove the environment and the demo's run"

demo: $(VENV)/.runtime
	@rm -rf runs/$(DEMO_RUN)
	@$(BIN)/agentrl train --config examples/hello/train.toml --name $(DEMO_RUN)

examples: $(VENV)/.dev
	@$(BIN)/python scripts/run_examples.py $(EXAMPLES)

test: $(VENV)/.dev check
	@$(BIN)/python -m pytest $(PYTEST)

check: $(VENV)/.dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright --pythonpath $(BIN)/python

$(VENV)/.torch:
	@echo "making $(VENV) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) $(TORCH)
	@touch $@

# --no-deps: the files are complete, and the resolver shall not look at torch again.
$(VENV)/.runtime: requirements/runtime.txt pyproject.toml $(VENV)/.torch
	@echo "installing what agentrl needs ..."
	@$(PIP) --no-deps --require-hashes -r requirements/runtime.txt
	@$(PIP) --no-deps -e .
	@touch $@

$(VENV)/.dev: requirements/dev.txt $(VENV)/.runtime
	@echo "installing what the tests need ..."
	@$(PIP) --no-deps --require-hashes -r requirements/dev.txt
	@touch $@

lock: $(VENV)/.torch
	@$(PIP) uv
	@$(BIN)/python scripts/lock.py

clean:
	rm -rf $(VENV) runs/$(DEMO_RUN)
