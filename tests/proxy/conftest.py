"""A gateway on a real port over a real store, with a scripted sampler in place of a model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from running_gateway import WEIGHTS, running
from scripted_sampler import Running

from agentrl_proxy.rendering.renderer import Renderer

_OF_LITELLM = (  # its use of pydantic, and connections that it closes too late
    "ignore:.*using the `ReadOnly` qualifier:UserWarning",
    "ignore:Accessing the 'model_:DeprecationWarning",
    "ignore:Pydantic serializer warnings:UserWarning",
    "ignore:Sending a large body:ResourceWarning",  # it is sent from LiteLLM's own loop
    "ignore::pytest.PytestUnraisableExceptionWarning",
    "ignore::pytest.PytestUnhandledThreadExceptionWarning",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folders = [Path(__file__).parent / name for name in ("providers", "protocols", "requests")]
    for item in items:
        if any(folder in item.path.parents for folder in folders):
            for one in _OF_LITELLM:
                item.add_marker(pytest.mark.filterwarnings(one))


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(WEIGHTS)


@pytest.fixture(scope="session")
def renderer(tokenizer: Any) -> Renderer:
    return Renderer(tokenizer)


@pytest.fixture
def start(tmp_path: Path, renderer: Renderer) -> Iterator[Callable[..., Running]]:
    """Starts a gateway with settings of the test's own."""
    with contextlib.ExitStack() as stack:
        yield lambda sampling=None, **deps: stack.enter_context(
            running(tmp_path, renderer, sampling or {}, **deps)
        )


@pytest.fixture
def gateway(start: Callable[..., Running]) -> Running:
    return start()


@pytest.fixture(scope="module")
def shared_gateway(tmp_path_factory: pytest.TempPathFactory, renderer: Renderer):
    """One gateway for a module's many examples, each with rollouts of its own."""
    with running(tmp_path_factory.mktemp("shared"), renderer, {}) as gateway:
        yield gateway
