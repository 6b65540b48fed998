"""``agentrl run``: run an agent on one task and print its trace, to debug it."""

from __future__ import annotations

import sys

from rich.text import Text

from agentrl.cli import Tokens
from agentrl.cli.fixed_model import execute
from agentrl.config.commands import RunConfig
from agentrl.config.loading import load
from agentrl.config.settings import OtherModelSettings
from agentrl.console.output import console
from agentrl.console.trace_tree import rollout_tree
from agentrl.runner import validate_agent
from agentrl.training.rollout_queue import rollout_seed
from agentrl_tracer.schemas import NewRollout, Purpose, RolloutState
from agentrl_trainer.tiny import MODEL_DIR


def run_command(*tokens: Tokens) -> None:
    """Run an agent on one task and print its trace: spans, calls, rewards, output and errors.

    A failure is shown, not retried; the exit code is 1 then.
    """
    config = load(RunConfig, tokens)
    validate_agent(config.agent.entrypoint, other_python=config.agent.python is not None)
    asks_for = None
    if config.model.base_url is not None:
        asks_for = config.model.name
        _use_server(config, config.model.base_url)
    seed = rollout_seed(config.run.seed, "run")
    session, [rollout], _ = execute(
        config,
        "run",
        [config.agent.task],
        lambda ids: [NewRollout(ids[0], "run", Purpose.EVAL, step=0, index=0, seed=seed)],
        asks_for,
    )
    console.print(rollout_tree(session.store, rollout))
    session.store.close()
    console.print(Text(f"recorded in {session.folder.root}", "dim"), soft_wrap=True)
    if rollout.state is not RolloutState.SUCCEEDED:
        sys.exit(1)


def _use_server(config: RunConfig, base_url: str) -> None:
    """Put the server at ``base_url`` behind the gateway, which records its calls.

    The gateway needs a model of its own too: the built-in one, under a name (its folder) that no
    agent requests.
    """
    model = config.model
    config.models[model.name] = OtherModelSettings(
        model=f"openai/{model.name}", api_base=base_url, api_key_env=model.api_key_env
    )
    model.name, model.adapter = str(MODEL_DIR), "no-adapter"
    config.gateway.accept_any_model = False  # other model names get 404, not the built-in model
