"""``agentrl serve`` stays: its gateway process comes back, and ends when it is told to."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_gateway import until
from served import Served

from agentrl.gateway.handle import GatewayHandle

LONG: dict[str, Any] = {
    "max_tokens": 300,
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": {"type": "string", "minLength": 5000}},
    },
}

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    with contextlib.ExitStack() as stack:
        yield lambda *arguments: stack.enter_context(
            contextlib.closing(Served(tmp_path, *arguments))
        )


def test_its_gateway_comes_back_and_then_ends_in_order(serve: Callable[..., Served]) -> None:
    served = serve("--gateway.grace", "30")
    assert served.ask().status_code == 200
    first = served.gateway()
    # As a gateway ends whose engine has died (see gateway/test_process.py).
    os.kill(first, signal.SIGTERM)
    until(lambda: not Path(f"/proc/{first}").exists(), 20)
    assert served.ask().status_code == 200  # the connection waited for the next one
    second = served.gateway()
    assert second != first
    assert "starting it again" in served.all_said()

    answers: list[httpx.Response] = []
    slow = threading.Thread(target=lambda: answers.append(served.ask(**LONG)))
    slow.start()
    health = f"{served.url}/healthz"
    until(lambda: httpx.get(health, timeout=10).json()["in_flight"] == 1, 20)
    assert served.end(signal.SIGTERM) == 0
    slow.join(45)
    assert [answer.status_code for answer in answers] == [200]  # it drained
    assert not Path(f"/proc/{second}").exists()
    with socket.socket() as probe, pytest.raises(ConnectionRefusedError):
        probe.connect(("127.0.0.1", int(served.url.rpartition(":")[2])))


def test_a_gateway_that_dies_again_and_again_ends_it(serve: Callable[..., Served]) -> None:
    served, pid = serve(), 0
    for _ in range(5):
        pid = served.gateway(other_than=pid)
        os.kill(pid, signal.SIGKILL)
    assert served.process.wait(30) == 1
    said = served.all_said()
    assert re.search(r"died 5 times in a row.*code\s.*-9", said, re.DOTALL)
    assert said.count("starting it again") == 4


NO_SERVER = "http://127.0.0.1:1"


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("<locked>", "vllm: the server wants an API key"),
        (NO_SERVER, f"no vLLM server is ready at {NO_SERVER}"),
    ],
    ids=["locked", "none"],
)
def test_a_vllm_that_no_gateway_can_use_ends_it_at_once(
    serve: Callable[..., Served], url: str, why: str
) -> None:
    with locked_vllm() as locked:
        flags = ["--sampler", "vllm", "--sampler.vllm.wait", "0"]
        served = serve("--sampler.vllm.url", url.replace("<locked>", locked), *flags)
        assert served.process.wait(60) == 2
    said = " ".join(served.all_said().split())
    assert why in said
    assert "cannot start with these settings" in said
    assert said.count("the gateway cannot start: ") == 1
    assert "starting it again" not in said
    assert "Traceback" not in said


def test_a_model_that_is_not_there_ends_it_before_it_listens() -> None:
    command = [sys.executable, "-m", "agentrl", "serve", "--model", "/nowhere/at/all"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "/nowhere/at/all" in done.stderr
    assert "Traceback" not in done.stderr


@contextlib.contextmanager
def locked_vllm() -> Iterator[str]:
    """A server that is up, and wants a key."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/health" else 401)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class Flickering(GatewayHandle):
    """Its process dies now and then, and in between it is well, for moments."""

    def __init__(self, dies_at: list[int]) -> None:
        self.asked = 0
        self._dies_at = dies_at
        self.deaths = self.last_code = 1
        self.could_not_start = False

    def health(self, timeout_s: float = 2.0) -> dict[str, Any] | None:
        self.asked += 1
        self.deaths = sum(self.asked >= at for at in self._dies_at)
        return {} if self.asked % 2 else None


def test_moments_of_health_are_no_health(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.gateway.handle._WATCH_S", 0.01)
    monkeypatch.setattr("agentrl.gateway.handle._LIVED_S", 0.1)
    with pytest.raises(RuntimeError, match="5 times in a row"):
        Flickering([0, 50, 100, 150, 200]).watch()
