"""A Tinker server on this machine, and a process with the official SDK."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import uvicorn
from fastapi import FastAPI
from peer import Ask, peer
from starlette.requests import Request

from agentrl.tinker_server import create_app
from agentrl.tinker_server.server import TinkerServer

SUPPORT = Path(__file__).parents[2] / "support"


@dataclass(frozen=True)
class Served:
    url: str
    folder: Path
    server: TinkerServer
    requests: list[str]
    """Paths of the requests that arrived."""


@contextmanager
def _serving(folder: Path) -> Iterator[Served]:
    app: FastAPI = create_app(folder, ["agentrl-tiny"])
    paths: list[str] = []

    @app.middleware("http")
    async def note(request: Request, call_next):
        paths.append(request.url.path.removeprefix("/api/v1/"))
        return await call_next(request)

    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    (socket,) = server.servers[0].sockets
    yield Served(f"http://127.0.0.1:{socket.getsockname()[1]}", folder, app.state.server, paths)
    server.should_exit = True
    thread.join()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    """A server of the test's own."""
    with _serving(tmp_path) as made:
        yield made


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with _serving(tmp_path_factory.mktemp("tinker-server")) as made:
        yield made


@pytest.fixture(scope="module")
def sdk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    """The process of ``tinker_checks``."""
    home = tmp_path_factory.mktemp("sdk")
    with peer(sys.executable, SUPPORT / "tinker_checks.py", home) as ask:
        yield ask
