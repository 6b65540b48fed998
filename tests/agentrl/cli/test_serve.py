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
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentrl.gateway.handle import GatewayHandle

HELLO: dict[str, Any] = {
    "model": "agentrl-tiny",
    "messages": [{"role": "user", "content": "Who are you?"}],
    "max_tokens": 8,
}
LONG: dict[str, Any] = {
    "max_tokens": 300,
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": {"type": "string", "minLength": 5000}},
    },
}

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


class Served:
    """A running ``agentrl serve``."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        if "--store" not in arguments:
            arguments = ("--store", str(folder / "served.db"), *arguments)
        self.said = (folder / "said").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "agentrl", "serve", "--port", "0", "--device", "cpu",
             *arguments],
            stdout=subprocess.PIPE, stderr=self.said, text=True, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert self.process.stdout is not None
        found = None
        while found is None:
            line = self.process.stdout.readline()
            assert line, "the server ended"
            found = re.search(r"http://[\d.]+:\d+", line)
        self.url = found[0]

    def gateway(self, other_than: int = 0) -> int:
        """The process id of the gateway, once there is one."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            threads = children.parent.parent.glob("*/children")  # whichever started it
            pids = {int(pid) for file in threads for pid in file.read_text().split()}
            if pids - {other_than}:
                [pid] = pids - {other_than}
                return pid
            time.sleep(0.02)
        raise AssertionError("there is no gateway")

    def ask(self, **more: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/chat/completions", json=HELLO | more, timeout=60)

    def end(self, how: signal.Signals) -> int:
        self.process.send_signal(how)
        return self.process.wait(45)

    def all_said(self) -> str:
        self.said.seek(0)
        return self.said.read()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    started: list[Served] = []

    def start(*arguments: str) -> Served:
        started.append(Served(tmp_path, *arguments))
        return started[-1]

    yield start
    for one in started:
        with one.process, one.said:
            one.process.kill()


def test_its_gateway_comes_back_and_then_ends_in_order(serve: Callable[..., Served]) -> None:
    served = serve("--gateway.grace", "30")
    assert served.ask().status_code == 200
    first = served.gateway()
    # As a gateway ends whose engine has died (see test_supervision.py).
    os.kill(first, signal.SIGTERM)
    until(lambda: not Path(f"/proc/{first}").exists())
    assert served.ask().status_code == 200  # the connection waited for the next one
    second = served.gateway()
    assert second != first
    assert "starting it again" in served.all_said()

    answers: list[httpx.Response] = []
    slow = threading.Thread(target=lambda: answers.append(served.ask(**LONG)))
    slow.start()
    until(lambda: in_flight(served) == 1)
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


@pytest.mark.parametrize(
    ("setting", "value", "why"),
    [
        ("--model", "/nowhere/at/all", "/nowhere/at/all"),
        ("--store", "postgresql://u@127.0.0.1:1/x", "store: connection failed"),
        ("--sampler.vllm.url", "<a locked one>", "vllm: the server wants an API key"),
        (
            "--sampler.vllm.url",
            "http://127.0.0.1:1",
            "no vLLM server is ready at http://127.0.0.1:1",
        ),
    ],
    ids=["model", "store", "vllm", "nobody"],
)
def test_settings_that_no_gateway_can_use_end_it_at_once(
    serve: Callable[..., Served], setting: str, value: str, why: str
) -> None:
    with contextlib.ExitStack() as stack:
        if setting == "--sampler.vllm.url":
            url = value if "://" in value else stack.enter_context(locked_vllm())
            served = serve("--sampler", "vllm", setting, url, "--sampler.vllm.wait", "0")
        else:
            served = serve(setting, value)
        assert served.process.wait(60) == 2
    said = " ".join(served.all_said().split())
    assert why in said
    assert "cannot start with these settings" in said
    assert said.count("the gateway cannot start: ") == 1
    assert "starting it again" not in said
    assert "Traceback" not in said


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
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


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


def in_flight(served: Served) -> int:
    return httpx.get(f"{served.url}/healthz", timeout=10).json()["in_flight"]


def until(true: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)
