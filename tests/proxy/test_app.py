"""The gateway's routes: every error's shape, models, health and adapters."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from gateway_client import BODY, HTTP, error_of, post
from official_clients import TOOLS, USER, client
from scripted_sampler import OPERATOR_KEY, Running

OPERATOR = {"authorization": f"Bearer {OPERATOR_KEY}"}


WRONG: dict[str, list[Any]] = {
    "messages": [[], None], "model": [None], "temperature": ["hot", True, 2.1], "top_p": [0],
    "top_k": [0.5], "max_tokens": [0], "max_completion_tokens": [1.5], "n": [0, 129],
    "stop": ["", ["a"] * 17], "seed": ["x"], "logprobs": [1], "top_logprobs": [2],
    "stream": ["yes"], "stream_options": [[]], "tools": [{}],
}  # fmt: skip
NESTED: list[tuple[dict[str, Any], str]] = [
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
     "messages[0].content[0]"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]},
     "messages[0].tool_calls[0].function.name"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
    ({"response_format": {"type": "yaml"}}, "response_format.type"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "param"),
    [*(({name: value}, name) for name, values in WRONG.items() for value in values), *NESTED],
)
def test_a_wrong_field_is_named(
    shared_gateway: Running, change: dict[str, Any], param: str
) -> None:
    gateway = shared_gateway
    response = post(gateway.base_url() + "/chat/completions", OPERATOR_KEY, BODY | change)
    assert response.status_code == 400
    error = error_of(response)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert gateway.sampler.requests == []


def test_harmless_fields_are_accepted(gateway: Running) -> None:
    content = [{"type": "text", "text": "Say you "}, {"type": "text", "text": "are 7."}]
    body = {
        "model": "policy",
        "messages": [
            {"role": "developer", "content": "Be brief.", "name": "x", "surprise": 1},
            {"role": "user", "content": content},
        ],
        "temperature": None,
        "user": "u",
        "store": False,
        "parallel_tool_calls": True,
        "frequency_penalty": 0,
        "tools": TOOLS,
        "tool_choice": {"type": "function", "function": {"name": "search"}},
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}},
    }
    assert post(gateway.base_url() + "/chat/completions", OPERATOR_KEY, body).status_code == 200
    prompt = gateway.renderer.decode_raw(gateway.sampler.requests[0].prompt_ids)
    assert "Be brief." in prompt
    assert "<|im_start|>user\nSay you are 7.<|im_end|>" in prompt


@pytest.mark.parametrize(
    ("method", "path", "content", "status", "code"),
    [
        ("GET", "/nowhere", b"", 404, "not_found"),
        ("GET", "/v1/chat/completions", b"", 405, "method_not_allowed"),
        ("POST", "/v1/chat/completions", b"{", 400, "invalid_json"),
        ("POST", "/v1/chat/completions", b"[]", 400, "invalid_value"),
        ("POST", "/v1/chat/completions", b" " * 2000, 413, "body_too_large"),
        ("POST", "/v1/traces", b"x", 415, "unsupported_media_type"),
    ],
)
def test_errors_have_one_shape(
    start: Any, method: str, path: str, content: bytes, status: int, code: str
) -> None:
    gateway: Running = start(max_body_bytes=1000)
    headers = {"authorization": f"Bearer {OPERATOR_KEY}"}
    response = httpx.request(method, gateway.url + path, content=content, headers=headers)
    assert response.status_code == status
    assert error_of(response)["code"] == code


def test_an_internal_error_says_nothing_but_its_shape(gateway: Running) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("secret detail")

    gateway.sampler.stats = broken  # type: ignore[method-assign]
    response = HTTP.get(f"{gateway.url}/healthz")
    assert response.status_code == 500
    assert error_of(response)["code"] == "internal_error"
    assert "secret" not in response.text


def test_models(start: Any) -> None:
    gateway: Running = start(accept_any_model=False)
    with client(gateway) as api:
        assert [model.id for model in api.models.list()] == ["base", "policy"]
        with pytest.raises(openai.NotFoundError) as caught:
            api.chat.completions.create(model="gpt-4o-mini", messages=USER)
        assert caught.value.code == "model_not_found"
        answer = api.chat.completions.create(model="base", messages=USER)
        assert answer.system_fingerprint == "base"
    [call] = gateway.calls(gateway.claims[0])
    assert (call.adapter, call.adapter_version) == (None, None)


def test_health_and_adapters(gateway: Running) -> None:
    url = f"{gateway.url}/admin/adapters"
    body = {"name": "policy", "version": 4, "path": "/somewhere"}
    assert post(url, gateway.claims[0].key, body).status_code == 403
    assert post(url, None, body).status_code == 401
    assert error_of(post(url, OPERATOR_KEY, body | {"version": True}))["param"] == "version"
    assert post(url, OPERATOR_KEY, body | {"path": "/missing"}).status_code == 503
    assert post(url, OPERATOR_KEY, body).json() == {"name": "policy", "version": 4}
    assert gateway.sampler.loaded == [("policy", 4, "/somewhere")]
    health = HTTP.get(f"{gateway.url}/healthz", headers=OPERATOR).json()
    assert health["status"] == "ok"
    assert health["boot_id"] == gateway.deps.boot_id
    assert health["adapters"] == {"policy": 4}
    with client(gateway) as api:
        answer = api.chat.completions.create(model="policy", messages=USER)
    assert answer.system_fingerprint == "policy@4"


def test_an_adapter_that_is_not_loaded(gateway: Running) -> None:
    gateway.sampler.adapters = {}
    response = post(gateway.base_url() + "/chat/completions", OPERATOR_KEY)
    assert response.status_code == 503
    assert error_of(response)["code"] == "adapter_not_loaded"
