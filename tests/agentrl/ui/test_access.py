"""Who may see and send what: token, Host, Origin, headers of every answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from command_line import agentrl
from ui_pages import Recorded, serve_pages


@pytest.fixture
def signed_in(link: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=link.split("/?")[0], trust_env=False) as client:
        client.get(f"/?{link.partition('?')[2]}")
        yield client


def test_without_the_token_there_is_nothing_to_see(link: str) -> None:
    with httpx.Client(base_url=link.split("/?")[0], trust_env=False) as stranger:
        assert stranger.get("/").status_code == 403
        assert stranger.get("/?token=wrong").status_code == 403
        assert stranger.post("/runs/known/notes", data={"note": "x"}).status_code == 403
        assert stranger.get("/static/app.css").status_code == 200
        cookie = stranger.get(f"/?{link.partition('?')[2]}").headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie


@pytest.mark.parametrize(
    "header",
    [
        {"host": "evil.example"},
        {"origin": "https://evil.example"},
        {"origin": "http://127.0.0.1:1"},
        {"origin": "null"},
    ],
)
def test_other_sites_can_neither_read_nor_send(
    signed_in: httpx.Client, header: dict[str, str]
) -> None:
    answer = signed_in.post("/runs/known/notes", data={"note": "x"}, headers=header)
    assert answer.status_code == 403
    if "host" in header:
        assert signed_in.get("/", headers=header).status_code == 403


def test_every_answer_has_the_policy(signed_in: httpx.Client, recorded: Recorded) -> None:
    paths = ["/", "/runs/none", "/static/app.css", "/?token=x", *recorded.views.values()]
    answers = [signed_in.get(path) for path in paths]
    answers.append(signed_in.get("/", headers={"host": "evil.example"}))
    for answer in answers:
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'")
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"


def test_links_survive_a_restart(recorded: Recorded, link: str) -> None:
    with serve_pages(recorded.root) as again:
        assert again.partition("?")[2] == link.partition("?")[2]


def test_other_machines_need_the_operator_key(tmp_path: Path) -> None:
    for key in ((), ("--operator-key", "short")):
        done = agentrl("ui", tmp_path, "--host", "0.0.0.0", "--port", "0", *key)
        assert done.returncode == 2
        assert "operator" in done.stderr
