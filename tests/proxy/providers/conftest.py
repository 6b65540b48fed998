"""A gateway whose provider is a second gateway, or a server that answers as a test says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from provider_servers import SECRET, FaultyServer, answerer
from running_gateway import running
from scripted_sampler import Running

from agentrl_proxy.providers.litellm_setup import make_router
from agentrl_proxy.rendering.renderer import Renderer


@pytest.fixture(scope="module", autouse=True)
def litellm() -> None:
    """LiteLLM, imported before a test measures time."""
    asyncio.run(make_router({}))


@pytest.fixture
def provider(tmp_path: Path, renderer: Renderer) -> Iterator[Running]:
    """An OpenAI-compatible server that wants a key."""
    with running(tmp_path / "provider", renderer, {}, operator_key=SECRET) as serving:
        yield serving


@pytest.fixture
def gateway(start: Callable[..., Running], provider: Running) -> Running:
    """A gateway for which the provider's model is ``answerer``."""
    return start(provider_models={"answerer": answerer(provider)})


@pytest.fixture
def faulty() -> Iterator[Callable[..., FaultyServer]]:
    servers: list[FaultyServer] = []

    def make(*answers: tuple[int, Any]) -> FaultyServer:
        servers.append(FaultyServer(*answers))
        return servers[-1]

    yield make
    for server in servers:
        server.close()
