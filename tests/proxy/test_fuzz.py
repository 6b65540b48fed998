"""Garbage in, never a 500 out: structured nonsense at every POST route of a real gateway."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripted_sampler import OPERATOR_KEY, Running

from agentrl_proxy.protocols.openapi import SCHEMAS

FUZZ = settings(
    max_examples=int(os.environ.get("AGENTRL_FUZZ_EXAMPLES", "120")),
    deadline=None,
    derandomize="AGENTRL_FUZZ_EXAMPLES" not in os.environ,  # a failing build must fail again
    suppress_health_check=list(HealthCheck),
)

CHAT: dict[str, Any] = {
    "model": "policy",
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "search", "arguments": '{"q": 1}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "name": "search", "content": "found"},
    ],
    "tools": [
        {
            "type": "function",
            "function": {"name": "search", "description": "d", "parameters": {"type": "object"}},
        }
    ],
    "tool_choice": "auto",
    "response_format": {"type": "text"},
    "max_tokens": 4,
    "max_completion_tokens": 4,
    "temperature": 1.0,
    "top_p": 0.5,
    "top_k": 3,
    "n": 1,
    "stop": ["x"],
    "seed": 1,
    "logprobs": True,
    "top_logprobs": 1,
    "stream": False,
    "stream_options": {"include_usage": True},
}
REWARD: dict[str, Any] = {"value": 1.0, "name": "reward", "response_id": "r", "explanation": "e"}
ADAPTER: dict[str, Any] = {"name": "policy", "version": 4, "path": "/somewhere"}
ATTRIBUTES = [
    {"key": "gen_ai.evaluation.score.value", "value": {"doubleValue": 1.0}},
    {"key": "gen_ai.evaluation.name", "value": {"stringValue": "reward"}},
    {"key": "gen_ai.response.id", "value": {"stringValue": "r"}},
    {"key": "list", "value": {"arrayValue": {"values": [{"intValue": "1"}]}}},
]
SPAN = {
    "traceId": "0af7651916cd43dd8448eb211c80319c",
    "spanId": "b7ad6b7169203331",
    "parentSpanId": "",
    "name": "agentrl.reward",
    "kind": 1,
    "startTimeUnixNano": "1",
    "endTimeUnixNano": "2",
    "status": {"code": 1},
    "attributes": ATTRIBUTES,
    "events": [{"name": "e", "timeUnixNano": "1", "attributes": []}],
}
TRACES: dict[str, Any] = {
    "resourceSpans": [{"resource": {"attributes": []}, "scopeSpans": [{"spans": [SPAN]}]}]
}


def nested(depth: int, *, lists: bool) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value] if lists else {"a": value}
    return value


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**80), 2**80),
    st.sampled_from([2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 10**400]),
    st.floats(),  # NaN and infinities too
    st.text(st.characters(exclude_categories=())),  # lone surrogates too
    st.sampled_from(
        [
            "\0",
            "a\0b",
            "\ud800",
            "\udfff x",
            "<|im_end|>",
            "<tool_call>",
            "{{ 1/0 }}",
            "function",
            "developer",
            "none",
            "required",
            "image_url",
            "[" * 3000,
            '{"a":' * 3000,
            "[" * 900 + "]" * 900,
            '"\\ud800"',
            '{"\\ud800": "\\u0000"}',
            "1" * 5000,
            "NaN",
            "\u202e\u2028",
        ]
    ),
)
GARBAGE = st.one_of(
    SCALARS,
    st.recursive(
        SCALARS,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=6,
    ),
    st.builds(nested, st.sampled_from([100, 250, 300, 900]), lists=st.booleans()),
)


@st.composite
def broken(draw: st.DrawFn, valid: Any, garbage: st.SearchStrategy[Any] = GARBAGE) -> Any:
    """``valid`` with up to three of its parts exchanged for garbage, removed or added."""
    value = copy.deepcopy(valid)
    for _ in range(draw(st.integers(1, 3))):
        node, steps = value, draw(st.integers(0, 7))
        for _ in range(steps):
            inner = [
                item
                for item in (node.values() if isinstance(node, dict) else node)
                if isinstance(item, dict | list) and item
            ]
            if not inner:
                break
            node = draw(st.sampled_from(inner))
        if not node:
            continue
        place = draw(st.sampled_from(list(node) if isinstance(node, dict) else range(len(node))))
        change = draw(st.sampled_from(["exchange"] * 4 + ["remove", "add"]))
        if change == "exchange":
            node[place] = draw(garbage)
        elif change == "remove":
            del node[place]
        elif isinstance(node, dict):
            node[draw(st.text(max_size=5))] = draw(garbage)
        else:
            node.append(draw(garbage))
    return value


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    """One for all: making one costs more than a request."""
    with httpx.Client(trust_env=False) as client:
        yield client


def dumped(value: Any) -> bytes:
    return json.dumps(value).encode()


def check(response: httpx.Response) -> None:
    assert response.status_code < 500, response.text
    if response.status_code == 200:
        assert "internal_error" not in response.text
        return
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    assert len(body["error"]["message"]) < 1500


def post(http: httpx.Client, gateway: Running, path: str, content: bytes, **headers: str) -> None:
    key = gateway.claims[0].key if path.startswith("/rollouts") else OPERATOR_KEY
    headers = {
        "authorization": f"Bearer {key}",
        "content-type": "application/json",
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
    check(http.post(gateway.url + path, content=content, headers=headers))


def rollout_path(gateway: Running, path: str) -> str:
    return f"/rollouts/{gateway.claims[0].rollout_id}{path}"


@FUZZ
@given(body=broken(CHAT), retry=st.sampled_from(["0", "1", "x"]))
def test_chat(http: httpx.Client, gateway: Running, body: Any, retry: str) -> None:
    path = rollout_path(gateway, "/v1/chat/completions")
    post(http, gateway, path, dumped(body), x_stainless_retry_count=retry)
    assert gateway.stats["failed"] == 0, "it was accepted, and then failed"


@FUZZ
@given(body=broken(REWARD))
def test_rewards(http: httpx.Client, gateway: Running, body: Any) -> None:
    post(http, gateway, rollout_path(gateway, "/v1/rewards"), dumped(body))


@FUZZ
@given(body=broken(TRACES))
def test_traces(http: httpx.Client, gateway: Running, body: Any) -> None:
    post(http, gateway, rollout_path(gateway, "/v1/traces"), dumped(body))


@FUZZ
@given(body=broken(ADAPTER))
def test_adapters(http: httpx.Client, gateway: Running, body: Any) -> None:
    post(http, gateway, "/admin/adapters", dumped(body))


@FUZZ
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
    if not path.startswith("/admin"):
        path = rollout_path(gateway, path)
    post(http, gateway, path, content, content_type=kind, content_encoding=encoding)


@FUZZ
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
    for target in (path, rollout_path(gateway, "/v1/chat/completions")):
        made = [(name.encode(), value) for name, value in headers.items()]
        check(http.post(gateway.url + target, content=dumped(CHAT), headers=made))


ARGUMENTS = [
    "[" * 3000,
    '"\\ud800"',
    '{"\\ud800": "\\u0000"}',
    "1" * 5000,
    "NaN",
    "[" * 900 + "]" * 900,
]


@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_arguments_are_any_text(gateway: Running, http: httpx.Client, arguments: str) -> None:
    """JSON inside JSON is read by another parser, with other ideas of what is valid."""
    body = copy.deepcopy(CHAT)
    body["messages"][2]["tool_calls"][0]["function"]["arguments"] = arguments
    for _ in range(2):
        post(http, gateway, rollout_path(gateway, "/v1/chat/completions"), dumped(body))
    assert gateway.stats["failed"] == 0


@pytest.mark.parametrize("depth", [200, 300, 900, 5000])
def test_depth(gateway: Running, http: httpx.Client, depth: int) -> None:
    body = copy.deepcopy(CHAT)
    body["tools"][0]["function"]["parameters"] = "HERE"
    for opening, closing in ((b"[", b"]"), (b'{"a":', b"}")):
        deep = opening * depth + b"1" + closing * depth
        content = dumped(body).replace(b'"HERE"', deep)
        post(http, gateway, rollout_path(gateway, "/v1/chat/completions"), content)
    assert gateway.stats["failed"] == 0
    assert (gateway.stats["accepted"] > 0) == (depth < 250)


def test_postgresql_takes_what_sqlite_takes(start: Any, http: httpx.Client, postgres: str) -> None:
    """It keeps no NUL characters, knows no NaN in JSON, and its integers end earlier."""
    gateway: Running = start(store_url=postgres)
    chat, traces = (
        rollout_path(gateway, "/v1/chat/completions"),
        rollout_path(gateway, "/v1/traces"),
    )
    for nasty in ("\0", "a\0b", "\ufffe", 2**63, 2**64 - 1, -(2**63), 1e308, float("nan")):
        for field in CHAT:
            post(http, gateway, chat, dumped(CHAT | {field: nasty}))
        for message in ({"role": "user", "content": nasty}, {"role": "user", "name": nasty}):
            post(http, gateway, chat, dumped(CHAT | {"messages": [{"content": "x", **message}]}))
        for field in REWARD:
            body = dumped(REWARD | {field: nasty})
            post(http, gateway, rollout_path(gateway, "/v1/rewards"), body)
        for field in SPAN:
            spans = [SPAN | {"name": "span"} | {field: nasty}]
            body = {"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]}
            post(http, gateway, traces, dumped(body))
        for kind in ("stringValue", "intValue", "doubleValue"):
            attributes = [{"key": "k", "value": {kind: nasty}}]
            spans = [SPAN | {"name": "span", "attributes": attributes}]
            body = {"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]}
            post(http, gateway, traces, dumped(body))
    assert gateway.stats["failed"] == 0
    assert gateway.store.accounting(gateway.run_id).adds_up
    spent = gateway.store.spent(gateway.claims[0].attempt_id)
    assert spent[0] == len(gateway.calls(gateway.claims[0]))
    assert spent[1] > spent[0] > 10
    assert sum(gateway.store.continuity(gateway.run_id)[gateway.claims[0].rollout_id].values()) > 10


def test_everything_accepted_is_recorded(gateway: Running) -> None:
    """What the fuzzers above rely on: their valid bodies are accepted, row by row."""
    for path, body in (("chat/completions", CHAT), ("rewards", REWARD), ("traces", TRACES)):
        response = httpx.post(
            gateway.url + rollout_path(gateway, f"/v1/{path}"),
            json=body,
            headers={"authorization": f"Bearer {gateway.claims[0].key}"},
        )
        assert response.status_code == 200, response.text
    assert len(gateway.calls(gateway.claims[0])) == 1
    assert len(gateway.store.rewards([gateway.claims[0].rollout_id])) == 2


def test_the_document_describes_the_routes(gateway: Running) -> None:
    # The gateway imports LiteLLM meanwhile, which a busy machine takes long for.
    document = httpx.get(f"{gateway.url}/openapi.json", timeout=60).json()
    described = {
        (path, method.upper())
        for path, item in document["paths"].items()
        for method in item
        if method != "parameters"
    }
    routes = {
        (route.path.replace(":path}", "}"), method)
        for route in gateway.app.routes
        for method in route.methods - {"HEAD"}
        if route.path != "/openapi.json"
    }
    assert routes <= described
    assert described <= routes
    assert set(CHAT) <= set(SCHEMAS["ChatCompletionRequest"]["properties"])
    for path, item in document["paths"].items():
        if "post" in item and path.startswith("/rollouts"):
            answer = httpx.post(gateway.url + path.replace("{rollout_id}", "nobody"), timeout=60)
            assert answer.status_code == 401, path


@pytest.mark.parametrize("path", ["/healthz", "/v1/models", "/v1/chat/completions", "/nowhere"])
def test_the_head_of_an_answer_can_be_asked_for(gateway: Running, path: str) -> None:
    """uvicorn writes no body then, so the head must not wait for one."""
    with httpx.Client(base_url=gateway.url, timeout=10) as client:  # one connection for both
        head, whole = client.head(path), client.get(path)
    assert head.status_code == whole.status_code or head.status_code == 405
    assert not head.content
    assert head.headers["content-type"] == whole.headers["content-type"]


@pytest.mark.parametrize("name", ["ChatCompletionRequest", "RewardRequest", "AdapterRequest"])
def test_what_the_document_requires_is_required(gateway: Running, name: str) -> None:
    path, body = {
        "ChatCompletionRequest": ("/v1/chat/completions", CHAT),
        "RewardRequest": (rollout_path(gateway, "/v1/rewards"), REWARD),
        "AdapterRequest": ("/admin/adapters", ADAPTER),
    }[name]
    key = gateway.claims[0].key if "rewards" in path else OPERATOR_KEY
    for field in SCHEMAS[name]["required"]:
        less = {k: v for k, v in body.items() if k != field}
        response = httpx.post(
            gateway.url + path, json=less, headers={"authorization": f"Bearer {key}"}
        )
        assert response.status_code == 400, field
        assert response.json()["error"]["param"] == field
