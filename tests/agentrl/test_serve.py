"""``agentrl serve`` stays: its gateway process comes back, and ends when it is told to."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

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
        self.store = str(folder / "served.db")
        self.said = (folder / "said").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "agentrl.cli", "serve", "--port", "0", "--device", "cpu",
             "--store", self.store, *arguments],
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
    served = serve("--grace", "30")
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
    assert re.search(r"died 5 times in a row.*code\s.*-9", served.all_said(), re.DOTALL)


def test_settings_that_no_gateway_can_use_end_it_at_once(serve: Callable[..., Served]) -> None:
    served = serve("--model", "/nowhere/at/all")
    assert served.process.wait(60) == 2
    said = served.all_said()
    assert "/nowhere/at/all" in said
    assert "cannot start with these settings" in said
    assert "Traceback" not in said


def in_flight(served: Served) -> int:
    return httpx.get(f"{served.url}/healthz", timeout=10).json()["in_flight"]


def until(true: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)
