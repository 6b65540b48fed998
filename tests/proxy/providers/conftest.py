"""A gateway whose provider is a second gateway, or a server that answers as a test says."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from provider_servers import SECRET, FaultyServer, answerer
from running_gateway import running
from scripted_sampler import Running

from agentrl_proxy.providers.litellm import make_router
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
def serving_provider(
    tmp_path_factory: pytest.TempPathFactory, renderer: Renderer
) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("provider")
    with running(folder, renderer, {}, operator_key=SECRET) as serving:
        yield serving


@pytest.fixture
def provider(serving_provider: Running) -> Running:
    """An OpenAI-compatible server that wants a key, without requests so far."""
    sampler = serving_provider.sampler
    fresh = type(sampler)(sampler.renderer)
    vars(sampler).update(vars(fresh))
    return serving_provider


@pytest.fixture(scope="module")
def serving_gateway(
    tmp_path_factory: pytest.TempPathFactory, renderer: Renderer, serving_provider: Running
) -> Iterator[Running]:
    models = {"answerer": answerer(serving_provider)}
    folder = tmp_path_factory.mktemp("gateway")
    with running(folder, renderer, {}, provider_models=models) as serving:
        yield serving


@pytest.fixture
def gateway(serving_gateway: Running, provider: Running) -> Running:
    """The module's gateway with rollouts of the test's own."""
    return replace(serving_gateway, claims=serving_gateway.new_claims(2))


@pytest.fixture
def faulty() -> Iterator[Callable[..., FaultyServer]]:
    servers: list[FaultyServer] = []

    def make(*answers: tuple[int, Any]) -> FaultyServer:
        servers.append(FaultyServer(*answers))
        return servers[-1]

    yield make
    for server in servers:
        server.close()
