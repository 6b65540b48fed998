"""The relay of a sandbox passes requests on, and refuses those that give rewards."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from agentrl.runner.coding_tasks.guard import pass_requests
from agentrl.runner.coding_tasks.relay import relay

ASK = b"POST /rollouts/r/v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
REWARD = b"POST /rollouts/r/v1/rewards HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"


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

        options = {"args": (listener, connect, pass_requests), "daemon": True}
        threading.Thread(target=relay, **options).start()
        with socket.create_connection(listener.getsockname()) as connected:
            yield connected


def _with_body(body: bytes) -> bytes:
    return ASK + b"Content-Length: %d\r\n\r\n" % len(body) + body


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "body",
    [
        "\u4f60\u597d" * 10_000,
        "x " * 30_000,
        'a log: "POST /v1/rewards HTTP/1.1" 200',  # is no request
        "A /b HTTP/1.1",
    ],
)
def test_bodies_of_any_kind_pass_and_a_reward_behind_them_does_not(
    server: socket.socket, client: socket.socket, body: str
) -> None:
    sent = _with_body(body.encode())
    threading.Thread(target=client.sendall, args=(sent + REWARD,), daemon=True).start()
    passed, _ = server.accept()
    with passed, passed.makefile("rb") as received:
        got = received.read()
        assert client.recv(100).startswith(b"HTTP/1.1 403 ")
    assert got.startswith(ASK.splitlines()[0])
    assert got.endswith(b"\r\n\r\n" + body.encode())


@pytest.mark.timeout(60)
def test_a_chunked_request_passes(server: socket.socket, client: socket.socket) -> None:
    client.sendall(ASK + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n")
    client.shutdown(socket.SHUT_WR)
    passed, _ = server.accept()
    with passed, passed.makefile("rb") as received:
        assert received.read().endswith(b"3\r\nabc\r\n0\r\n\r\n")


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("first", "code"),
    [
        (b"POST /rollouts/r/v1/rewards#x HTTP/1.1", b"403"),
        (b"POST /rollouts/r/v1/rew%61rds HTTP/1.1", b"403"),
        (b"POST /rollouts/r/v1/traces?" + b"x" * 20_000 + b" HTTP/1.1", b"403"),
        (b"POST http://x/rollouts/r/v1/Rewards/ HTTP/1.0", b"403"),
        (b"POST /rollouts/r/v1/rewards HTTP/2.0", b"403"),
        (b"POST /rollouts/r/v1/rewards HTTP/0.9", b"403"),
        (b"POST /rollouts/r/v1/rewards?" + b"x" * 70_000 + b" HTTP/1.1", b"400"),
    ],
)
def test_a_reward_is_refused_however_it_is_written(
    server: socket.socket, client: socket.socket, first: bytes, code: bytes
) -> None:
    for piece in (first[:15], first[15:], b"\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"):
        client.sendall(piece)
    passed, _ = server.accept()
    with passed, passed.makefile("rb") as received:
        assert client.recv(100).startswith(b"HTTP/1.1 " + code)
        assert received.read() == b""
