"""The relay of a sandbox passes bodies of any kind on, and refuses requests that give rewards."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from agentrl.runner.coding_tasks.relay import relay


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


@pytest.fixture
def client(server: socket.socket) -> Iterator[socket.socket]:
    """A connection to the server through a guarded relay."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def connect() -> socket.socket:
            return socket.create_connection(server.getsockname())

        options = {"args": (listener, connect), "kwargs": {"guard": True}, "daemon": True}
        threading.Thread(target=relay, **options).start()
        with socket.create_connection(listener.getsockname()) as connected:
            yield connected


@pytest.mark.timeout(60)
@pytest.mark.parametrize("body", ["\u4f60\u597d" * 10_000, "x " * 30_000, "x" + " " * 60_000 + "x"])
def test_long_bodies_pass_and_a_request_for_rewards_behind_one_does_not(
    server: socket.socket, client: socket.socket, body: str
) -> None:
    sent = b"POST /v1/chat/completions HTTP/1.1\r\n\r\n" + body.encode()
    threading.Thread(target=client.sendall, args=(sent,), daemon=True).start()
    passed, _ = server.accept()
    with passed, passed.makefile("rb") as received:
        assert received.read(len(sent)) == sent
        client.sendall(b"POST /v1/rewards HTTP/1.1\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 403 ")
        assert received.read() == b""
