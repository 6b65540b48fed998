"""``agentrl run``: one task, once, and what happened, as a tree. For debugging an agent."""

from __future__ import annotations

import time

from rich.console import Console
from rich.text import Text

from agentrl.config.commands import RunConfig
from agentrl.config.settings import OtherModelSettings
from agentrl.console.trace_tree import rollout_tree
from agentrl.runs.folder import RunFolder, adapters_to_serve
from agentrl.training.rollout_queue import rollout_seed
from agentrl.training.session import Session
from agentrl_tracer.schemas import NewRollout, Purpose, RolloutState
from agentrl_trainer.data.skip_reasons import evaluation_reasons
from agentrl_trainer.tiny import MODEL_DIR


def run_once(config: RunConfig, console: Console) -> bool:
    """Runs the agent on the task and prints its trace; True if the rollout succeeded."""
    asks_for = config.model.name if config.model.base_url else None
    config = _asking_elsewhere(config, config.model.base_url) if config.model.base_url else config
    adapters = adapters_to_serve(config)
    folder = RunFolder.create(config.run.folder, None, "run")
    session = Session(
        folder,
        config,
        "run",
        base_only=not adapters,
        adapter_paths=adapters,
        asks_for=asks_for,
    )
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
    return rollout.state is RolloutState.SUCCEEDED


def _asking_elsewhere(config: RunConfig, base_url: str) -> RunConfig:
    """The same, with ``base_url`` behind our gateway, so that its calls are recorded too.

    The gateway wants a model of its own all the same: the built-in one, under a name (its folder)
    that is nobody else's, as is the adapter's.
    """
    elsewhere = OtherModelSettings(
        model=f"openai/{config.model.name}", api_base=base_url, api_key_env=config.model.api_key_env
    )
    return config.model_copy(
        update={
            "model": config.model.model_copy(
                update={"name": str(MODEL_DIR), "adapter": "no-adapter"}
            ),
            "models": {**config.models, config.model.name: elsewhere},
            # An agent that asks for something else shall hear so: not the built-in model.
            "gateway": config.gateway.model_copy(update={"accept_any_model": False}),
        }
    )
