"""A gateway with a provider that plays the judge, for all tests: LiteLLM takes seconds to start."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from judging import Bench, JudgeServer
from running_gateway import WEIGHTS, running
from scripted_sampler import Running

from agentrl_proxy.dependencies import ProviderModel
from agentrl_proxy.rendering.renderer import Renderer

_OF_LITELLM = (
    "ignore:.*using the `ReadOnly` qualifier:UserWarning",
    "ignore:Accessing the 'model_:DeprecationWarning",
    "ignore:Pydantic serializer warnings:UserWarning",
    "ignore::pytest.PytestUnraisableExceptionWarning",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            for one in _OF_LITELLM:
                item.add_marker(pytest.mark.filterwarnings(one))


@pytest.fixture(scope="session")
def _gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, JudgeServer]]:
    from transformers import AutoTokenizer

    server = JudgeServer()
    prices = {"input_cost_per_token": 0.01, "output_cost_per_token": 0.1}
    settings = {"num_retries": 0, "timeout": 20.0, "api_key": "none"}
    base = f"{server.url}/v1"
    models = {
        "judge": ProviderModel("openai/gpt-9", base, params=prices, **settings),
        "other": ProviderModel("openai/gpt-9", base, **settings),
        "away": ProviderModel("openai/gpt-9", "http://127.0.0.1:9/v1", **settings),
    }
    renderer = Renderer(AutoTokenizer.from_pretrained(WEIGHTS))
    folder = tmp_path_factory.mktemp("judges")
    with running(folder, renderer, {}, provider_models=models) as gateway:
        yield gateway, server
    server.close()


@pytest.fixture
def bench(_gateway: tuple[Running, JudgeServer], tmp_path: Path) -> Bench:
    gateway, server = _gateway
    server.seen.clear()
    server.bodies.clear()
    return Bench(gateway, server, tmp_path)
