"""A gateway whose provider is a second gateway, or a server that answers as a test says."""

from __future__ import annotations

import gc
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
def imported_litellm() -> Iterator[None]:
    """Imports LiteLLM before a test measures time. Ends its HTTP sessions, which belong to the
    loops of this module's gateways, where pytest ignores the warning about it."""
    make_router({})
    yield
    gc.collect()


@pytest.fixture(autouse=True)
def own_sessions(imported_litellm: None) -> Iterator[None]:
    """Keeps LiteLLM from using one gateway's sessions in the event loop of the next."""
    import litellm

    litellm.in_memory_llm_clients_cache.flush_cache()
    yield
    litellm.in_memory_llm_clients_cache.flush_cache()


@pytest.fixture
def provider(tmp_path: Path, renderer: Renderer) -> Iterator[Running]:
    """An OpenAI-compatible server that wants a key."""
    folder = tmp_path / "provider"
    folder.mkdir()
    with running(folder, renderer, {}, operator_key=SECRET) as serving:
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
