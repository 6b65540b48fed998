"""``agentrl runner``: run rollouts of a run in progress, from this or another machine.

Settings that are not given are the run's. The process holds nothing that the run needs: if it is
killed, its leases expire.
"""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Any

from agentrl.cli import Tokens
from agentrl.config.commands import JoinConfig
from agentrl.config.errors import ConfigError
from agentrl.config.loading import load
from agentrl.config.secrets import secret_variables, store_url, variables_in
from agentrl.config.setting_names import recorded
from agentrl.config.settings.rollouts import RunnerSettings
from agentrl.console.output import print_line
from agentrl.interrupts import end_in_order
from agentrl.runner.pool_client import start_pool
from agentrl.runner.protocol import RunnerConfig
from agentrl_tracer.store import Store

_POLL_S = 1.0


def runner_command(*tokens: Tokens) -> None:
    """Run rollouts of a run in progress until it ends, from this or another machine.

    The exit code is 1 if the run failed or was interrupted: Docker's `restart: on-failure` then
    starts this command again, and it joins the run once that is resumed.
    """
    settings = load(JoinConfig, tokens)
    with contextlib.closing(Store(store_url(settings.run.store))) as store:
        run = _find_run(store, settings.run.id)
        if run["state"] == "running":
            run = _run_until_it_ends(settings, store, run)
    if run["state"] != "running":
        print_line(f"{run['name']} is {run['state']}: there are no more rollouts to run")
    if run["state"] in ("failed", "interrupted"):
        sys.exit(1)


def _run_until_it_ends(settings: JoinConfig, store: Store, run: dict[str, Any]) -> dict[str, Any]:
    """Return the run as it was at last: in progress, if this process was told to stop."""
    config = runner_config(settings, run)
    end_in_order()
    pool = start_pool(config).supervise()
    print_line(
        f"{config.runners} runners for {run['name']} ({run['id']}), agent {config.agent}; "
        f"their log is {pool.log}"
    )
    try:
        with contextlib.suppress(KeyboardInterrupt):
            while (run := _find_run(store, run["id"]))["state"] == "running":
                time.sleep(_POLL_S)
                moved = runner_config(settings, run)
                if moved.gateways != config.gateways:  # the run was continued, on other ports
                    pool.stop()
                    config = moved
                    pool = start_pool(config).supervise()
                    print_line(f"the run's gateway is now at {' '.join(config.gateways)}")
    finally:
        pool.stop()
    return run


def runner_config(settings: JoinConfig, run: dict[str, Any]) -> RunnerConfig:
    """Return the given settings, completed by those of the run.

    Raises:
        ConfigError: the run's settings are those of an earlier version.
    """
    started: dict[str, Any] = run["config"]
    agent = recorded(started, "agent.entrypoint")
    if agent is None:
        raise ConfigError(f"run.id: an earlier version started the run {run['id']}; it cannot join")
    gateways = settings.gateway.url or recorded(started, "gateway.urls")
    if gateways is None:
        raise ConfigError(f"gateway.url: the store has none of the run {run['id']}; give it")
    # The settings that the run did not change may be new since it was started.
    ours = RunnerSettings().model_dump() | (started.get("rollouts") or {})
    return RunnerConfig(
        store=store_url(settings.run.store),
        gateways=[url.rstrip("/") for url in gateways],
        run_id=run["id"],
        agent=settings.agent.entrypoint or agent,
        model=_model_name(run),
        logs=str(settings.run.logs.absolute()),
        runners=settings.rollouts.runners,
        timeout_s=settings.rollouts.timeout or ours["timeout"],
        lease_s=ours["lease"],
        rollouts_per_process=ours["rollouts_per_process"],
        log_bytes=ours["log_mib"] << 20,
        concurrency=settings.rollouts.concurrency or ours["concurrency"],
        user=settings.agent.user or recorded(started, "agent.user"),
        sandbox=recorded(started, "agent.sandbox", False)
        if settings.agent.sandbox is None
        else settings.agent.sandbox,
        hidden=[str(settings.run.logs.absolute())],
        python=settings.agent.python,  # of this machine
        # Keys that agents on the trainer's machine would inherit.
        withheld=[*secret_variables(started), *variables_in(settings.run.store)],
    )


def _model_name(run: dict[str, Any]) -> str:
    """Return the model name that the run's own runners give to agents, see ``Session``."""
    model, adapters = run["config"]["model"], list(run["config"].get("adapters") or {})
    if run["kind"] != "train" and not model.get("adapter_path"):
        return model["adapter" if model.get("answered_by") else "name"]
    return adapters[0] if len(adapters) == 1 else model["adapter"]


def _find_run(store: Store, wanted: str | None) -> dict[str, Any]:
    """Return the run of this id or name; by default the newest one in progress."""
    runs = store.runs()
    if wanted is None:
        found = [run for run in runs if run["state"] == "running"]
    else:
        found = [run for run in runs if wanted in (run["id"], run["name"])]
    if not found:
        what = f"the run {wanted!r}" if wanted else "a run in progress"
        raise ConfigError(f"run.id: the store does not hold {what}; it has {len(runs)} runs")
    return found[-1]
