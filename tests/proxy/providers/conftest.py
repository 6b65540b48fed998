"""A gateway whose provider is a second gateway, or a server that answers as a test says."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from provider_servers import SECRET, FaultyServer, answerer
from running_gateway import running
from scripted_sampler import Running, ScriptedSampler

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


@pytest.fixture(scope="module")
def shared_provider(
    tmp_path_factory: pytest.TempPathFactory, renderer: Renderer
) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("provider")
    with running(folder, renderer, {}, operator_key=SECRET) as serving:
        yield serving


@pytest.fixture(scope="module")
def shared_gateway(
    tmp_path_factory: pytest.TempPathFactory, renderer: Renderer, shared_provider: Running
) -> Iterator[Running]:
    models = {"answerer": answerer(shared_provider)}
    with running(tmp_path_factory.mktemp("x"), renderer, {}, provider_models=models) as serving:
        yield serving


def fresh(shared: Running) -> Running:
    """A gateway as a test finds it: with new rollouts, and a sampler of which nothing is known."""
    vars(shared.sampler).update(vars(ScriptedSampler(shared.renderer)))
    return replace(shared, claims=shared.new_claims(3))


@pytest.fixture
def provider(shared_provider: Running) -> Running:
    """An OpenAI-compatible server that wants a key."""
    return fresh(shared_provider)


@pytest.fixture
def gateway(shared_gateway: Running, provider: Running) -> Running:
    """A gateway for which the provider's model is ``answerer``."""
    return fresh(shared_gateway)


@pytest.fixture
def faulty() -> Iterator[Callable[..., FaultyServer]]:
    servers: list[FaultyServer] = []

    def make(*answers: tuple[int, Any]) -> FaultyServer:
        servers.append(FaultyServer(*answers))
        return servers[-1]

    yield make
    for server in servers:
        server.close()
