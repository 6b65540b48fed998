"""Garbage in, never a 500 out: structured nonsense at every POST route of a real gateway."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from garbage import GARBAGE, REQUESTS, broken, fuzz
from hypothesis import given
from hypothesis import strategies as st
from scripted_sampler import OPERATOR_KEY, Running

CHAT = REQUESTS["chat/completions"]
REWARD: dict[str, Any] = {"value": 1.0, "name": "reward", "response_id": "r", "explanation": "e"}
ADAPTER: dict[str, Any] = {"name": "policy", "version": 4, "path": "/somewhere"}
SPAN = {
    "traceId": "0af7651916cd43dd8448eb211c80319c", "spanId": "b7ad6b7169203331",
    "parentSpanId": "", "name": "agentrl.reward", "kind": 1, "startTimeUnixNano": "1",
    "endTimeUnixNano": "2", "status": {"code": 1},
    "attributes": [
        {"key": "gen_ai.evaluation.score.value", "value": {"doubleValue": 1.0}},
        {"key": "gen_ai.evaluation.name", "value": {"stringValue": "reward"}},
        {"key": "gen_ai.response.id", "value": {"stringValue": "r"}},
        {"key": "list", "value": {"arrayValue": {"values": [{"intValue": "1"}]}}},
    ],
    "events": [{"name": "e", "timeUnixNano": "1", "attributes": []}],
}  # fmt: skip


def export(**span: Any) -> dict[str, Any]:
    spans = [SPAN | span]
    return {"resourceSpans": [{"resource": {"attributes": []}, "scopeSpans": [{"spans": spans}]}]}


BODIES = {
    **{f"/v1/{path}": body for path, body in REQUESTS.items()},
    "/v1/rewards": REWARD,
    "/v1/traces": export(),
    "/admin/adapters": ADAPTER,
}


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    """One for all: making one costs more than a request."""
    with httpx.Client(trust_env=False, timeout=60) as client:
        yield client


def dumped(value: Any) -> bytes:
    return json.dumps(value).encode()


def check(response: httpx.Response) -> None:
    assert response.status_code < 500, response.text
    if response.status_code == 200:
        assert "internal_error" not in response.text
        return
    body = response.json()
    if "type" in body:
        assert set(body["error"]) == {"type", "message"}  # Anthropic's
    else:
        assert set(body["error"]) == {"message", "type", "param", "code"}
    assert 0 < len(body["error"]["message"]) < 1500


def post(
    http: httpx.Client, gateway: Running, path: str, content: bytes, **headers: str
) -> httpx.Response:
    """Send a body to a path, of the first rollout if it is one that rollouts have."""
    claim, admin = gateway.claims[0], path.startswith("/admin")
    headers = {
        "authorization": f"Bearer {OPERATOR_KEY if admin else claim.key}",
        "content-type": "application/json",
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
    url = gateway.url + ("" if admin else f"/rollouts/{claim.rollout_id}") + path
    response = http.post(url, content=content, headers=headers)
    check(response)
    return response


@pytest.mark.parametrize("path", BODIES)
def test_broken_requests(http: httpx.Client, gateway: Running, path: str) -> None:
    gateway.sampler.script = lambda *_: "ok"
    statuses = {post(http, gateway, path, dumped(BODIES[path])).status_code}
    assert statuses == {200}

    @fuzz(120)
    @given(body=broken(BODIES[path]), retry=st.sampled_from(["0", "1", "x"]))
    def send(body: Any, retry: str) -> None:
        response = post(http, gateway, path, dumped(body), x_stainless_retry_count=retry)
        statuses.add(response.status_code)

    send()
    assert statuses >= {200, 400}
    assert gateway.stats["failed"] == 0, "it was accepted, and then failed"
    assert gateway.store.accounting(gateway.run_id).adds_up


@fuzz(120)
@given(
    path=st.sampled_from(["/v1/chat/completions", "/v1/traces", "/v1/rewards", "/admin/adapters"]),
    content=st.one_of(
        st.binary(max_size=200),
        GARBAGE.map(dumped),
        st.sampled_from([b"[" * 100_000, b'{"a":' * 2000, b'"\xff"', b"\x00", b"1" * 5000]),
    ),
    kind=st.sampled_from(["application/json", "application/x-protobuf", "text/plain", ""]),
    encoding=st.sampled_from(["identity", "gzip", "deflate", "br"]),
)
def test_bodies(
    http: httpx.Client, gateway: Running, path: str, content: bytes, kind: str, encoding: str
) -> None:
    post(http, gateway, path, content, content_type=kind, content_encoding=encoding)


@fuzz(120)
@given(
    path=st.binary(max_size=20).map(lambda raw: "/" + quote(raw)),
    headers=st.dictionaries(
        st.sampled_from(
            ["authorization", "x-api-key", "x-agentrl-rollout", "x-agentrl-agent", "traceparent",
             "idempotency-key", "host", "x-stainless-retry-count", "content-encoding"]
        ),
        st.binary(min_size=1, max_size=30).map(
            lambda raw: bytes(b for b in raw if b > 32 and b != 127) or b"x"
        ),
    ),
)  # fmt: skip
def test_paths_and_headers(
    http: httpx.Client, gateway: Running, path: str, headers: dict[str, bytes]
) -> None:
    chat = f"/rollouts/{gateway.claims[0].rollout_id}/v1/chat/completions"
    for target in (path, chat):
        made = [(name.encode(), value) for name, value in headers.items()]
        check(http.post(gateway.url + target, content=dumped(CHAT), headers=made))


@pytest.mark.parametrize(
    "arguments",
    ["[" * 3000, '"\\ud800"', '{"\\ud800": "\\u0000"}', "1" * 5000, "NaN", "[" * 900 + "]" * 900],
)
def test_arguments_are_any_text(gateway: Running, http: httpx.Client, arguments: str) -> None:
    """JSON inside JSON is read by another parser, with other ideas of what is valid."""
    body = copy.deepcopy(CHAT)
    body["messages"][2]["tool_calls"][0]["function"]["arguments"] = arguments
    for _ in range(2):
        post(http, gateway, "/v1/chat/completions", dumped(body))
    assert gateway.stats["failed"] == 0


@pytest.mark.parametrize("depth", [200, 300, 900, 5000])
def test_depth(gateway: Running, http: httpx.Client, depth: int) -> None:
    body = copy.deepcopy(CHAT)
    body["tools"][0]["function"]["parameters"] = "HERE"
    for opening, closing in ((b"[", b"]"), (b'{"a":', b"}")):
        deep = opening * depth + b"1" + closing * depth
        content = dumped(body).replace(b'"HERE"', deep)
        post(http, gateway, "/v1/chat/completions", content)
    assert gateway.stats["failed"] == 0
    assert (gateway.stats["accepted"] > 0) == (depth < 250)


def test_postgresql_takes_what_sqlite_takes(start: Any, http: httpx.Client, postgres: str) -> None:
    """It keeps no NUL characters, knows no NaN in JSON, and its integers end earlier."""
    gateway: Running = start(store_url=postgres)
    claim = gateway.claims[0]
    for nasty in ("\0", "a\0b", "\ufffe", 2**63, 2**64 - 1, -(2**63), 1e308, float("nan")):
        bodies = [("chat/completions", CHAT | {field: nasty}) for field in CHAT]
        for message in ({"role": "user", "content": nasty}, {"role": "user", "name": nasty}):
            bodies.append(("chat/completions", CHAT | {"messages": [{"content": "x", **message}]}))
        bodies += [("rewards", REWARD | {field: nasty}) for field in REWARD]
        bodies += [("traces", export(**{"name": "span", field: nasty})) for field in SPAN]
        for kind in ("stringValue", "intValue", "doubleValue"):
            attributes = [{"key": "k", "value": {kind: nasty}}]
            bodies.append(("traces", export(name="span", attributes=attributes)))
        for path, body in bodies:
            post(http, gateway, f"/v1/{path}", dumped(body))
    assert gateway.stats["failed"] == 0
    assert gateway.store.accounting(gateway.run_id).adds_up
    spent = gateway.store.spent(claim.attempt_id)
    assert spent[0] == len(gateway.calls(claim))
    assert spent[1] > spent[0] > 10
    began = gateway.store.continuity(gateway.run_id)
    assert next(x for x in began if x.example == claim.rollout_id).kinds.total() > 10


@pytest.mark.parametrize("path", ["/healthz", "/v1/models", "/v1/chat/completions", "/nowhere"])
def test_the_head_of_an_answer_can_be_asked_for(gateway: Running, path: str) -> None:
    """uvicorn writes no body then, so the head must not wait for one."""
    with httpx.Client(base_url=gateway.url, timeout=10) as client:  # one connection for both
        head, whole = client.head(path), client.get(path)
    assert head.status_code == whole.status_code or head.status_code == 405
    assert not head.content
    assert head.headers["content-type"] == whole.headers["content-type"]
