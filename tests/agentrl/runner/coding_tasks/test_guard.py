"""What a sandbox may ask the gateway, and what it hears of the rest."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.runner.coding_tasks.guard import pass_requests


@pytest.mark.parametrize(
    ("request_line", "status"), [(b"POST /v1/rewards HTTP/1.1", b"403"), (b"no request", b"400")]
)
def test_a_refusal_arrives_though_the_gateway_hangs_up_at_once(
    request_line: bytes, status: bytes
) -> None:
    here, client = socket.socketpair()
    # The relay then ends what goes to the client.
    gateway: Any = SimpleNamespace(shutdown=lambda _how: here.shutdown(socket.SHUT_WR))
    with here, client:
        client.sendall(request_line + b"\r\nHost: gateway\r\nContent-Length: 0\r\n\r\n")
        client.shutdown(socket.SHUT_WR)
        pass_requests(here, gateway)
        assert client.recv(1000).startswith(b"HTTP/1.1 " + status)
