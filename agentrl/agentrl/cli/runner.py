"""``agentrl runner``: more runners for a run that is under way, from this or another machine.

Knows the store and the gateway by URL, and takes whatever it is not told from the run's own
configuration. It holds nothing that the run needs: killed at any moment, its leases run out.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

from rich.console import Console

from agentrl.config.commands import JoinConfig
from agentrl.config.errors import ConfigError
from agentrl.config.recorded import recorded
from agentrl.config.settings import RunnerSettings
from agentrl.gateway.handle import secret_variables
from agentrl.runner import RunnerConfig, start_pool
from agentrl_tracer.store import Store

_LOOK_S = 1.0


def join(settings: JoinConfig, console: Console) -> None:
    """Runs rollouts until the run is over.

    Raises:
        ConfigError: there is no such run, or it says not what its agent is.
    """
    store = Store(settings.run.store)
    run = _find_run(store, settings.run.id)
    config = runner_config(settings, run)
    pool = start_pool(config)
    console.print(
        f"{config.runners} runners for {run['name']} ({run['id']}), agent {config.agent}; "
        f"their log is {pool.log}",
        soft_wrap=True,
        markup=False,
    )
    try:
        with contextlib.suppress(KeyboardInterrupt):
            while _state(store, run["id"]) == "running":
                if not pool.alive():
                    console.print(f"the runners ended; starting them again\n{pool.log_tail(5)}")
                    pool.restart()
                time.sleep(_LOOK_S)
    finally:
        pool.stop()
        store.close()


def runner_config(settings: JoinConfig, run: dict[str, Any]) -> RunnerConfig:
    """What was told here comes before what the run was started with."""
    started: dict[str, Any] = run["config"]
    spec = settings.agent.entrypoint or recorded(started, "agent.entrypoint")
    if not spec:
        raise ConfigError(f"agent: is missing, and the run {run['id']} names none")

    def of_run(name: str) -> Any:
        default = RunnerSettings.model_fields[name].default
        return recorded(started, f"rollouts.{name}", default)

    return RunnerConfig(
        store=settings.run.store,
        gateway=settings.gateway.url,
        run_id=run["id"],
        agent=spec,
        model=_model_name(run),
        logs=str(settings.run.logs.absolute()),
        runners=settings.rollouts.runners,
        timeout_s=settings.rollouts.timeout or of_run("timeout"),
        lease_s=of_run("lease"),
        rollouts_per_process=of_run("rollouts_per_process"),
        concurrency=settings.rollouts.concurrency or of_run("concurrency"),
        python=settings.agent.python,  # of this machine
        withheld=_withheld(started),
    )


def _model_name(run: dict[str, Any]) -> str:
    """What the run's own runners tell agents to ask for, see ``Session``."""
    started: dict[str, Any] = run["config"]
    if run["kind"] != "train" and not recorded(started, "model.adapter_path"):
        answered = recorded(started, "model.answered_by")
        return recorded(started, "model.adapter" if answered else "model.name", "policy")
    adapters: dict[str, Any] = started.get("adapters") or {}
    return (
        next(iter(adapters)) if len(adapters) == 1 else recorded(started, "model.adapter")
    ) or "policy"


def _withheld(started: dict[str, Any]) -> tuple[str, ...]:
    """Environment variables with keys: on the trainer's machine agents would inherit them."""
    models: dict[str, Any] = started.get("models") or {}
    return secret_variables(models, recorded(started, "sampler.vllm.key_env"))


def _find_run(store: Store, run_id: str | None) -> dict[str, Any]:
    runs = store.runs()
    if run_id is not None:
        found = [run for run in runs if run_id in (run["id"], run["name"])]
    else:
        found = [run for run in runs if run["state"] == "running"]
    if not found:
        wanted = "a run that is under way" if run_id is None else f"the run {run_id!r}"
        raise ConfigError(f"run: the store does not hold {wanted}; it has {len(runs)} runs")
    return found[-1]


def _state(store: Store, run_id: str) -> str:
    return next(run["state"] for run in store.runs() if run["id"] == run_id)
