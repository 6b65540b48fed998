"""Requests that a browser sends for a foreign web page get nothing, on every route."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from gateway_client import connected
from scripted_sampler import OPERATOR_KEY, Running

from agentrl_proxy.app import ROUTES
from agentrl_proxy.server.hosts import HostCheck

KEY = {"authorization": f"Bearer {OPERATOR_KEY}"}


async def status(check: HostCheck, *headers: tuple[str, str]) -> int:
    raw = [(name.encode(), value.encode()) for name, value in headers]
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    await check({"type": "http", "headers": raw}, None, send)  # type: ignore[arg-type]
    return sent[0]["status"]


async def answer(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})


LOOPBACK = ["localhost", "LOCALHOST.:8000", "127.0.0.1:80", "127.9.9.9", "[::1]:8000", "[::1]"]
FOREIGN = ["evil.com", "evil.com:8000", "10.1.2.3", "127.0.0.1.evil.com", "localhost.evil.com",
           "[2001:db8::1]:80", "[::1", "evil.com@localhost.x", ":80", "192.168.0.1"]  # fmt: skip


@pytest.mark.parametrize(
    ("bound", "allowed", "passing", "refused"),
    [
        ("127.0.0.1", [], LOOPBACK, FOREIGN),
        ("10.1.2.3", [], [*LOOPBACK, "10.1.2.3:8000"], ["10.1.2.4", "evil.com"]),
        (
            "0.0.0.0",
            [],
            [*LOOPBACK, "10.1.2.3", "[2001:db8::1]"],
            ["evil.com", "10.1.2.3.evil.com"],
        ),
        ("::", [], [*LOOPBACK, "10.1.2.3", "[2001:db8::1]"], ["evil.com"]),
        ("127.0.0.1", ["Trainer"], ["trainer:9", "TRAINER."], ["trainer.evil.com", "a.trainer"]),
        ("127.0.0.1", ["*.lab.org"], ["a.lab.org", "a.b.lab.org:1"], ["lab.org", "evillab.org"]),
        ("127.0.0.1", ["*"], ["anything.com"], []),
    ],
)
async def test_only_names_of_the_server_are_taken_as_host(
    bound: str, allowed: list[str], passing: list[str], refused: list[str]
) -> None:
    check = HostCheck(answer, bound, allowed)
    for _ in range(2):  # the second time from memory
        assert [await status(check, ("host", one)) for one in passing] == [200] * len(passing)
        assert [await status(check, ("host", one)) for one in refused] == [403] * len(refused)
    assert await status(check) == 200  # HTTP/1.0: no browser
    if passing[0] != "anything.com":
        assert await status(check, ("host", "localhost"), ("host", "evil.com")) == 403
        assert await status(check, ("host", "evil.com"), ("host", "localhost")) == 403


@pytest.mark.parametrize(
    ("host", "origin", "expected"),
    [
        ("localhost:8000", "http://localhost:3000", 200),
        ("localhost:8000", "https://127.0.0.1", 200),
        ("10.1.2.3:8000", "http://10.1.2.3:8000", 200),  # a page of this server
        ("10.1.2.3:8000", "http://10.1.2.3:80", 403),  # of another server of that machine
        ("localhost:8000", "https://evil.com", 403),
        ("localhost:8000", "null", 403),  # a file, or a frame without a site
        ("localhost:8000", "http://6.6.6.6", 403),
        ("localhost:8000", "http://localhost.evil.com", 403),
    ],
)
async def test_a_page_of_another_site_is_refused_by_its_origin(
    host: str, origin: str, expected: int
) -> None:
    check = HostCheck(answer, "0.0.0.0")
    for _ in range(2):
        assert await status(check, ("host", host), ("origin", origin)) == expected


async def test_what_is_remembered_is_bounded() -> None:
    check = HostCheck(answer, "0.0.0.0")
    for i in range(1000):
        assert await status(check, ("host", f"10.0.{i // 250}.{i % 250}")) == 200
    assert len(check._known) <= 256  # pyright: ignore[reportPrivateUsage]


def test_a_rebound_page_gets_nothing_from_any_route(gateway: Running) -> None:
    foreign = [{"host": "evil.com"}, {"origin": "http://evil.com"}]
    with httpx.Client(base_url=gateway.url, headers=KEY) as http:
        for path, (method, _) in ROUTES.items():
            path = path.replace("{rollout_id}", "r").replace("{model:path}", "m")
            for headers in foreign:
                for how in (method, "OPTIONS"):
                    answered = http.request(how, path, headers=headers, content=b"{}")
                    assert answered.status_code == 403, (how, path)
                    assert "access-control-allow-origin" not in answered.headers
                    error = answered.json()["error"]
                    assert error["code"] == "host_not_allowed"
                    assert "--allowed-host evil.com" in error["message"]
        # A preflight from loopback is not granted either: browsers then do not send the request.
        asks = {"origin": "http://localhost:3000", "access-control-request-method": "POST"}
        preflight = http.options("/v1/chat/completions", headers=asks)
        assert preflight.status_code == 405
        assert "access-control-allow-origin" not in preflight.headers
        assert http.get("/v1/models").status_code == 200


def test_a_request_without_a_host_is_answered(gateway: Running) -> None:
    with connected(gateway) as sock:
        sock.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
        assert sock.recv(100).startswith(b"HTTP/1.1 200 ")
