"""A gateway that serves, with a store, rollouts and a scripted sampler of its own."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from scripted_sampler import OPERATOR_KEY, Running, ScriptedSampler

from agentrl_proxy.app import create_app
from agentrl_proxy.dependencies import GatewayDependencies
from agentrl_proxy.rendering.renderer import Renderer
from agentrl_proxy.server.uvicorn import serving
from agentrl_tracer.schemas import NewRollout, Purpose
from agentrl_tracer.store import Store
from agentrl_tracer.store.writer import TraceWriter

WEIGHTS = Path(__file__).parents[2] / "trainer/agentrl_trainer/tiny/weights"


@contextlib.contextmanager
def running(
    tmp_path: Path, renderer: Renderer, sampling: dict[str, Any], **deps: Any
) -> Iterator[Running]:
    store = Store(deps.pop("store_url", None) or str(tmp_path / "trace.db"))
    run_id = store.create_run("test", "train", {})
    tasks = store.add_tasks(run_id, "train", [{"n": 1}])
    rollouts = [
        NewRollout(tasks[0], "group", Purpose.TRAIN, 0, i, seed=100 + i, sampling=sampling)
        for i in range(3)
    ]
    store.enqueue(run_id, rollouts)
    claims = [store.claim("runner", 600.0, run_id) for _ in rollouts]
    store.register_gateway("boot", run_id, 1)
    writer = TraceWriter(store, "boot")
    sampler = ScriptedSampler(renderer)
    settings: dict[str, Any] = {
        "models": {"policy": "policy", "base": None},
        "default_adapter": "policy",
        "operator_key": OPERATOR_KEY,
        "run_id": run_id,
        "context_length": 2048,
        "defaults": {"max_tokens": 256},
    }
    made = GatewayDependencies(sampler, renderer, store, writer, "boot", **(settings | deps))
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
