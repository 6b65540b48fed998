"""A gateway that serves, with a store, rollouts and a scripted sampler of its own."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from scripted_sampler import OPERATOR_KEY, Running, ScriptedSampler

from agentrl_proxy.app import create_app
from agentrl_proxy.dependencies import ConnectionLimits, GatewayDependencies
from agentrl_proxy.rendering.renderer import Renderer
from agentrl_proxy.server.listening import bind, url_of
from agentrl_proxy.server.uvicorn import server_of
from agentrl_tracer.schemas import NewRollout, Purpose
from agentrl_tracer.store import Store
from agentrl_tracer.store.writer import TraceWriter

WEIGHTS = Path(__file__).parents[2] / "trainer/agentrl_trainer/tiny/weights"


LIMITS = ConnectionLimits(receive_s=60.0, receive_bytes=128 * 2**20, stall_s=60.0, grace_s=5)


def gateway_dependencies(
    sampler: Any, renderer: Renderer, store: Store, writer: TraceWriter, **settings: Any
) -> GatewayDependencies:
    """Dependencies with the settings' defaults where a test needs no others."""
    usual: dict[str, Any] = {
        "boot_id": "boot",
        "accept_any_model": True,
        "max_concurrent": 1024,
        "max_queued": 1024,
        "limits": LIMITS,
    }
    return GatewayDependencies(sampler, renderer, store, writer, **(usual | settings))


@contextlib.contextmanager
def serving(app: Any) -> Iterator[str]:
    """Serve an app from a thread of this process; yields its URL."""
    deps = app.state.gateway.deps
    with bind("127.0.0.1", 0, operator_key=deps.operator_key) as bound:
        server = server_of(app, bound)
        thread = threading.Thread(target=server.run, args=([bound],), daemon=True)
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive(), "the gateway did not start"
                time.sleep(0.01)
            yield url_of(bound)
        finally:
            server.should_exit = True
            thread.join(timeout=deps.limits.grace_s + 10)


@contextlib.contextmanager
def running(
    tmp_path: Path,
    renderer: Renderer,
    sampling: dict[str, Any],
    *,
    sampler: Any = None,
    **deps: Any,
) -> Iterator[Running]:
    """A gateway with three claimed rollouts of one task.

    Args:
        sampling: the rollouts' settings.
        sampler: a real one, running; default: a ScriptedSampler.
        deps: fields of GatewayDependencies, and ``store_url``.
    """
    store = Store(deps.pop("store_url", None) or str(tmp_path / "trace.db"))
    run_id = store.create_run("test", "train", {})
    tasks = store.add_tasks(run_id, "train", [{"n": 1}])
    rollouts = [
        NewRollout(tasks[0], "group", Purpose.TRAIN, 0, i, seed=100 + i, sampling=sampling)
        for i in range(3)
    ]
    store.enqueue(run_id, rollouts)
    claims = [store.claim("runner", 600.0, run_id) for _ in rollouts]
    boot_id = secrets.token_hex(6)  # tests share one PostgreSQL database
    store.register_gateway(boot_id, run_id, 1)
    writer = TraceWriter(store, boot_id)
    sampler = sampler or ScriptedSampler(renderer)
    settings: dict[str, Any] = {
        "boot_id": boot_id,
        "models": {"policy": "policy", "base": None},
        "default_adapter": "policy",
        "operator_key": OPERATOR_KEY,
        "run_id": run_id,
        "context_length": 2048,
        "defaults": {"max_tokens": 256},
    }
    made = gateway_dependencies(sampler, renderer, store, writer, **(settings | deps))
    app = create_app(made)
    try:
        with serving(app) as url:
            yield Running(
                url, store, sampler, renderer, made, app, run_id, [c for c in claims if c]
            )
    finally:
        writer.close()
        store.close()


@contextlib.contextmanager
def restarted(gateway: Running) -> Iterator[Running]:
    """The next process of a gateway: same store, and nothing remembered."""
    boot_id = secrets.token_hex(6)
    gateway.store.register_gateway(boot_id, gateway.run_id, os.getpid())
    writer = TraceWriter(gateway.store, boot_id)
    sampler = ScriptedSampler(gateway.renderer, gateway.sampler.script)
    deps = replace(gateway.deps, writer=writer, sampler=sampler, boot_id=boot_id)
    app = create_app(deps)
    try:
        with serving(app) as url:
            yield replace(gateway, url=url, sampler=sampler, deps=deps, app=app)
    finally:
        writer.close()
