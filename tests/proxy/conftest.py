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
