"""Who may see and send what: token, Host, Origin, headers of every answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest
from command_line import agentrl
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient
from starlette.types import Message, Scope
from ui_browser import serve_pages
from ui_pages import Recorded

from agentrl.ui.access import TokenGate


@pytest.fixture
def stranger(link: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=link.split("/?")[0], trust_env=False) as client:
        yield client


@pytest.fixture
def signed_in(link: str, stranger: httpx.Client) -> httpx.Client:
    answer = stranger.get(f"/runs/known?a=1&{link.partition('?')[2]}&b=")
    assert (answer.status_code, answer.headers["location"]) == (303, "/runs/known?a=1&b=")
    assert "HttpOnly" in answer.headers["set-cookie"]
    assert "SameSite=strict" in answer.headers["set-cookie"]
    return stranger


def test_without_the_token_there_is_nothing_to_see(stranger: httpx.Client) -> None:
    assert stranger.get("/").status_code == 403
    assert stranger.get("/?token=wrong").status_code == 403
    assert stranger.post("/runs/known/notes", data={"note": "x"}).status_code == 403
    assert stranger.get("/static/app.css").status_code == 200


def test_other_sites_can_neither_read_nor_send(signed_in: httpx.Client) -> None:
    for origin in ("https://evil.example", "http://127.0.0.1:1", "null"):
        sent = signed_in.post("/runs/known/notes", data={}, headers={"origin": origin})
        assert sent.status_code == 403
    assert signed_in.get("/", headers={"host": "evil.example"}).status_code == 403


def test_every_answer_has_the_policy(signed_in: httpx.Client, recorded: Recorded) -> None:
    paths = ["/", "/runs/none", "/static/app.css", "/?token=x", *recorded.views.values()]
    answers = [signed_in.get(path) for path in paths]
    answers.append(signed_in.get("/", headers={"host": "evil.example"}))
    for answer in answers:
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'")
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"


def test_links_survive_a_restart_and_other_machines_need_the_operator_key(
    recorded: Recorded, link: str, tmp_path: Path
) -> None:
    with serve_pages(recorded.root) as again:
        assert again.partition("?")[2] == link.partition("?")[2]
    for key in ((), ("--operator-key", "short")):
        done = agentrl("ui", tmp_path, "--host", "0.0.0.0", "--port", "0", *key)
        assert done.returncode == 2
        assert "operator" in done.stderr


def test_what_is_open_is_told_by_the_path_alone() -> None:
    sent: list[Message] = []

    async def app(scope, receive, send) -> None:
        raise AssertionError("the gate let it through")

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "http.request"}

    for path in ("/runs/known", "//x/static/"):  # Starlette may take the start of a URL for a host
        scope: Scope = {"type": "http", "method": "GET", "path": path, "query_string": b"",
                        "headers": [(b"host", b"x/static/")], "server": None}  # fmt: skip
        asyncio.run(TokenGate(app, "secret", 1)(scope, receive, send))
    assert [one["status"] for one in sent if "status" in one] == [403, 403]


@pytest.mark.parametrize("key", ["aGVsbG8+d29y/bGQ=&#%41", "schlüssel-Ł-of-mine"])
def test_an_operator_key_may_have_any_characters(key: str) -> None:
    gate = TokenGate(PlainTextResponse("in"), key, 1)
    client = TestClient(gate)
    assert client.get("/runs").status_code == 403
    assert client.get(f"/runs?token={quote(key)}").text == "in"  # by way of the cookie
    for link in ("/runs/x%00y", "/served/a?before=%00"):  # PostgreSQL takes none
        assert client.get(link).status_code == 404
