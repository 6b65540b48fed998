"""``agentrl run``: run an agent on one task and print its trace, to debug it."""

from __future__ import annotations

import sys
import time

from rich.text import Text

from agentrl.cli import Tokens
from agentrl.config.commands import RunConfig
from agentrl.config.loading import load, parse_flags
from agentrl.config.settings import OtherModelSettings
from agentrl.console.output import console
from agentrl.console.trace_tree import rollout_tree
from agentrl.runner import validate_agent
from agentrl.runs.folder import RunFolder, adapters_to_serve
from agentrl.training.rollout_queue import rollout_seed
from agentrl.training.session import Session
from agentrl_tracer.schemas import NewRollout, Purpose, RolloutState
from agentrl_trainer.data.skip_reasons import evaluation_reasons
from agentrl_trainer.tiny import MODEL_DIR


def run_command(*tokens: Tokens) -> None:
    """Run an agent on one task and print its trace: spans, calls, rewards, output and errors.

    A failure is shown, not retried; the exit code is 1 then.
    """
    config = load(RunConfig, parse_flags(RunConfig, tokens))
    validate_agent(config.agent.entrypoint, other_python=config.agent.python is not None)
    asks_for, url = None, config.model.base_url
    if url is not None:
        asks_for, config = config.model.name, _with_server(config, url)
    adapters = adapters_to_serve(config)
    folder = RunFolder.create(config.run.folder, None, "run")
    session = Session(folder, config, "run", adapter_paths=adapters, asks_for=asks_for)
    store, run_id = session.store, session.run_id
    [task_id] = store.add_tasks(run_id, "run", [config.agent.task])
    seed = rollout_seed(config.run.seed, "run")
    plan = [NewRollout(task_id, "run", Purpose.EVAL, step=0, index=0, seed=seed)]
    with session, console.status("starting") as status:
        session.wait_ready(status.update)
        status.update("running")
        started = time.monotonic()
        [rollout] = session.execute(plan, lambda _done, _all: None)
        seconds = time.monotonic() - started
    calls = store.calls(rollout_ids=[rollout.id])
    store.settle(trained={}, skipped=evaluation_reasons(calls))
    store.end_run(run_id, "finished")
    console.print(rollout_tree(store, rollout))
    store.close()
    console.print(Text(f"{seconds:.1f} s; recorded in {folder.root}", "dim"), soft_wrap=True)
    if rollout.state is not RolloutState.SUCCEEDED:
        sys.exit(1)


def _with_server(config: RunConfig, base_url: str) -> RunConfig:
    """Put the server at ``base_url`` behind the gateway, which records its calls.

    The gateway needs a model of its own too: the built-in one, under a name (its folder) that no
    agent requests.
    """
    server = OtherModelSettings(
        model=f"openai/{config.model.name}", api_base=base_url, api_key_env=config.model.api_key_env
    )
    return config.model_copy(
        update={
            "model": config.model.model_copy(
                update={"name": str(MODEL_DIR), "adapter": "no-adapter"}
            ),
            "models": {**config.models, config.model.name: server},
            # Other model names get 404, not the built-in model.
            "gateway": config.gateway.model_copy(update={"accept_any_model": False}),
        }
    )
