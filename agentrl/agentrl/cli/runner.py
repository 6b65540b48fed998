"""``agentrl runner``: run rollouts of a run in progress, from this or another machine.

Settings that are not given are the run's. The process holds nothing that the run needs: if it is
killed, its leases expire.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

from agentrl.cli import Tokens
from agentrl.config.commands import JoinConfig
from agentrl.config.errors import ConfigError
from agentrl.config.loading import load, parse_flags
from agentrl.config.recorded import recorded
from agentrl.config.settings import RunnerSettings
from agentrl.console.output import print_line
from agentrl.gateway.handle import secret_variables
from agentrl.runner import RunnerConfig, start_pool
from agentrl_tracer.store import Store

_POLL_S = 1.0


def runner_command(*tokens: Tokens) -> None:
    """Run rollouts of a run in progress until it ends, from this or another machine."""
    settings = load(JoinConfig, parse_flags(JoinConfig, tokens))
    store = Store(settings.run.store)
    run = _find_run(store, settings.run.id)
    config = runner_config(settings, run)
    pool = start_pool(config).supervise()
    print_line(
        f"{config.runners} runners for {run['name']} ({run['id']}), agent {config.agent}; "
        f"their log is {pool.log}"
    )
    try:
        with contextlib.suppress(KeyboardInterrupt):
            while _state(store, run["id"]) == "running":
                time.sleep(_POLL_S)
    finally:
        pool.stop()
        store.close()


def runner_config(settings: JoinConfig, run: dict[str, Any]) -> RunnerConfig:
    """Return the given settings, completed by those of the run.

    Raises:
        ConfigError: neither names the agent.
    """
    started: dict[str, Any] = run["config"]
    spec = settings.agent.entrypoint or recorded(started, "agent.entrypoint")
    if not spec:
        raise ConfigError(f"agent.entrypoint: is missing, and the run {run['id']} names none")

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
    """Return the model name that the run's own runners give to agents, see ``Session``."""
    started: dict[str, Any] = run["config"]
    if run["kind"] != "train" and not recorded(started, "model.adapter_path"):
        answered = recorded(started, "model.answered_by")
        return recorded(started, "model.adapter" if answered else "model.name", "policy")
    adapters: dict[str, Any] = started.get("adapters") or {}
    return (
        next(iter(adapters)) if len(adapters) == 1 else recorded(started, "model.adapter")
    ) or "policy"


def _withheld(started: dict[str, Any]) -> tuple[str, ...]:
    """Name the variables with keys, which agents on the trainer's machine would inherit."""
    models: dict[str, Any] = started.get("models") or {}
    return secret_variables(models, recorded(started, "sampler.vllm.key_env"))


def _find_run(store: Store, run_id: str | None) -> dict[str, Any]:
    runs = store.runs()
    if run_id is not None:
        found = [run for run in runs if run_id in (run["id"], run["name"])]
    else:
        found = [run for run in runs if run["state"] == "running"]
    if not found:
        wanted = "a run in progress" if run_id is None else f"the run {run_id!r}"
        raise ConfigError(f"run.id: the store does not hold {wanted}; it has {len(runs)} runs")
    return found[-1]


def _state(store: Store, run_id: str) -> str:
    return next(run["state"] for run in store.runs() if run["id"] == run_id)
