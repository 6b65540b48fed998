"""``agentrl runner``: more runners for a run that is under way, from this or another machine.

Knows the store and the gateway by URL, and takes whatever it is not told from the run's own
configuration. It holds nothing that the run needs: killed at any moment, its leases run out.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

from rich.console import Console

from agentrl.config.settings import ConfigError, JoinSettings
from agentrl.gateway.process import FORWARD_HEADERS, TINKER_KEY, variables_of
from agentrl.runner import RunnerConfig, start_pool
from agentrl_tracer.store import Store

_LOOK_S = 1.0


def join(agent: str | None, settings: JoinSettings, console: Console) -> None:
    """Runs rollouts until the run is over.

    Raises:
        ConfigError: there is no such run, or it says not what its agent is.
    """
    store = Store(settings.store)
    run = _find_run(store, settings.run)
    config = runner_config(agent, settings, run)
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


def runner_config(agent: str | None, settings: JoinSettings, run: dict[str, Any]) -> RunnerConfig:
    """What was told here comes before what the run was started with."""
    started: dict[str, Any] = run["config"]
    spec = agent or started.get("agent")
    if not spec:
        raise ConfigError(f"agent: is missing, and the run {run['id']} names none")

    def told(name: str) -> Any:
        value = getattr(settings, name)
        return value if value is not None else started.get(name)

    return RunnerConfig(
        store=settings.store,
        gateway=settings.gateway,
        run_id=run["id"],
        agent=spec,
        model=_model_name(run),
        logs=str(settings.logs.absolute()),
        runners=settings.runners,
        timeout_s=told("timeout") or 300.0,
        lease_s=started.get("lease") or 15.0,
        rollouts_per_process=started.get("rollouts_per_process") or 1,
        concurrency=told("concurrency") or 1,
        python=settings.python,  # of this machine
        withheld=_withheld(started),
    )


def _model_name(run: dict[str, Any]) -> str:
    """What the run's own runners tell agents to ask for, see ``Session``."""
    started: dict[str, Any] = run["config"]
    if run["kind"] != "train" and not started.get("adapter_path"):
        asked = started.get("adapter") if started.get("answered_by") else started.get("model")
        return asked or "policy"
    adapters: dict[str, Any] = started.get("adapters") or {}
    return (next(iter(adapters)) if len(adapters) == 1 else started.get("adapter")) or "policy"


def _withheld(started: dict[str, Any]) -> tuple[str, ...]:
    """Environment variables with keys: on the trainer's machine agents would inherit them."""
    models: dict[str, Any] = started.get("models") or {}
    names = (FORWARD_HEADERS, TINKER_KEY, started.get("vllm_key_env"))
    return tuple(name for name in (*names, *variables_of(models)) if name)


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
