"""``agentrl run``: run an agent on one task and print its trace, to debug it."""

from __future__ import annotations

import sys

from agentrl.cli import Tokens
from agentrl.cli.fixed_model import fixed_model
from agentrl.config.commands import RunConfig
from agentrl.config.loading import load
from agentrl.config.settings.models import OtherModelSettings
from agentrl.console.output import print_block, print_line
from agentrl.console.trace_tree import rollout_trace
from agentrl.runner.agent_spec import validate_agent
from agentrl.training.queue.rollout_queue import rollout_seed
from agentrl_tracer.schemas import NewRollout, Purpose, RolloutState
from agentrl_trainer.tiny import MODEL_DIR


def run_command(*tokens: Tokens) -> None:
    """Run an agent on one task and print its trace: spans, calls, rewards, output and errors.

    A failure is shown, not retried; the exit code is 1 then.
    """
    config = load(RunConfig, tokens)
    validate_agent(config.agent.entrypoint, other_python=config.agent.python is not None)
    model, asks_for = config.model, None
    if model.base_url is not None:
        # The gateway records that server's calls. It needs a model of its own too: the built-in
        # one, under a name (its folder) that no agent requests.
        asks_for = model.name
        config.models[asks_for] = OtherModelSettings(
            model=f"openai/{asks_for}", api_base=model.base_url, api_key_env=model.api_key_env
        )
        model.name, model.adapter = str(MODEL_DIR), "no-adapter"
        config.gateway.accept_any_model = False  # other names get 404, not the built-in model
    seed = rollout_seed(config.run.seed, "run")
    source = model.adapter_path
    with fixed_model(config, "run", [config.agent.task], asks_for, source=source) as made:
        new = NewRollout(made.task_ids[0], "run", Purpose.EVAL, step=0, index=0, seed=seed)
        [rollout] = made.execute([new])
    session = made.session
    print_block(rollout_trace(session.store, rollout))
    session.store.close()
    print_line((f"recorded in {session.folder.root}", "dim"))
    if rollout.state is not RolloutState.SUCCEEDED:
        sys.exit(1)
