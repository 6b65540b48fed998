"""HTTP requests and sockets to a gateway, for tests."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
from scripted_sampler import OPERATOR_KEY, Running

BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": [{"role": "user", "content": "Say you are 7."}]},
    "completions": {"prompt": "Say you are 7.", "max_tokens": 99},
    "responses": {"input": "Say you are 7."},
    "messages": {"messages": [{"role": "user", "content": "Say you are 7."}], "max_tokens": 99},
}
"""The shortest request of each path, without its model."""
BODY: dict[str, Any] = {"model": "policy"} | BODIES["chat/completions"]
# One SSL context for all tests: making one takes longer than a request.
HTTP = httpx.Client(
    verify=False, timeout=60, limits=httpx.Limits(max_keepalive_connections=0), trust_env=False
)


def post(url: str, key: str | None, body: Any = None, **more: Any) -> httpx.Response:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    headers |= more.pop("headers", None) or {}
    return HTTP.post(url, json=BODY if body is None else body, headers=headers, **more)


def ask(
    gateway: Running,
    path: str = "chat/completions",
    key: str | None = None,
    *,
    model: str = "policy",
    headers: Any = None,
    **body: Any,
) -> httpx.Response:
    """Send a path's shortest request as the first rollout, with more fields."""
    claim = gateway.claims[0]
    asked = {"model": model} | BODIES.get(path, BODIES["chat/completions"]) | body
    return post(f"{gateway.base_url(claim)}/{path}", key or claim.key, asked, headers=headers)


def error_of(response: httpx.Response) -> dict[str, Any]:
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]


def reward_export(value: Any) -> dict[str, Any]:
    """An OTLP/JSON export of one reward span."""
    span = {
        "traceId": "0af7651916cd43dd8448eb211c80319c",
        "spanId": "b7ad6b7169203331",
        "name": "agentrl.reward",
        "startTimeUnixNano": "1",
        "endTimeUnixNano": "1",
        "attributes": [{"key": "gen_ai.evaluation.score.value", "value": value}],
    }
    return {"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}


def head(path: str = "/v1/chat/completions", key: str = OPERATOR_KEY, **headers: Any) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: localhost", f"authorization: Bearer {key}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def wait_until(true: Callable[[], Any], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


@contextlib.contextmanager
def connected(gateway: Running, *, receive_buffer: int | None = None) -> Iterator[socket.socket]:
    host, port = gateway.url.removeprefix("http://").split(":")
    with socket.socket() as sock:
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.settimeout(20)
        sock.connect((host, int(port)))
        yield sock
