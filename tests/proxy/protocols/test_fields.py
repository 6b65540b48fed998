"""Errors name the field that is wrong, as the client's protocol calls it."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from provider_servers import SECRET, FaultyServer, said
from scripted_sampler import Running

from agentrl_proxy.dependencies import ProviderModel

HI = [{"role": "user", "content": "h"}]
LONG = "a b " * 3000
WRONG: dict[str, Any] = {"type": "object", "properties": {"a": {"type": 7}}}
TOOL: dict[str, Any] = {"type": "function", "name": "f", "parameters": {"type": "object"}}
THEIR_TOOL: dict[str, Any] = {"name": "f", "input_schema": {"type": "object"}}


def schema(**more: Any) -> dict[str, Any]:
    return {"text": {"format": {"type": "json_schema", "name": "x", "schema": {}} | more}}


def forced(**more: Any) -> dict[str, Any]:
    return {"tools": [TOOL | more], "tool_choice": "required"}


def their_forced(**more: Any) -> dict[str, Any]:
    return {"tools": [THEIR_TOOL | more], "tool_choice": {"type": "any"}}


def refused(gateway: Running, path: str, body: dict[str, Any], retry: bool) -> dict[str, Any]:
    claim = gateway.claims[0]
    headers = {"authorization": f"Bearer {claim.key}"}
    if retry:  # refused later: when the answer of the request that it repeats was looked for
        headers["x-stainless-retry-count"] = "1"
    answer = httpx.post(gateway.base_url(claim) + path, json=body, headers=headers, timeout=60)
    assert answer.status_code == 400
    return answer.json()["error"]


@pytest.mark.parametrize("retry", [False, True])
@pytest.mark.parametrize(
    ("more", "field", "said"),
    [
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens must be an integer"),
        ({"input": LONG}, "input", "the prompt is 6"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}, {}]}]},
            "input[0].content[1].text",
            "input[0].content[1].text must be a string",
        ),
        (schema(schema={"type": 5}), "text.format", "text.format.schema: type must"),
        (schema(strict="x"), "text.format.strict", "text.format.strict must be true or false"),
        (forced(strict="x"), "tools[0].strict", "tools[0].strict must be true or false"),
        (forced(parameters="x"), "tools[0].parameters", "tools[0].parameters must be an object"),
        (forced(parameters=WRONG), "tools[0].parameters", "tools[0].parameters: type must be"),
        (forced(name="a b"), "tools[0].name", "tools[0].name must be of the letters"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "x"}},
            "tool_choice",
            'or an object like {"type": "function", "name": "..."}; got',
        ),
    ],
)
def test_responses(
    shared_gateway: Running, more: dict[str, Any], field: str, said: str, retry: bool
) -> None:
    body = {"model": "policy", "input": "Hi"} | more
    error = refused(shared_gateway, "/responses", body, retry)
    assert error["param"] == field
    assert said in error["message"]


@pytest.mark.parametrize("retry", [False, True])
@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"max_tokens": 0}, "max_tokens must be an integer"),
        ({"stop_sequences": [5]}, "stop_sequences[0] must be a non-empty string"),
        ({"tool_choice": {"type": "any"}}, "tool_choice 'any' needs tools"),
        (their_forced(name="a b"), "tools[0].name must be of the letters"),
        (their_forced(input_schema=WRONG), "tools[0].input_schema: type must be"),
        (their_forced(input_schema={"type": "string"}), "tools[0].input_schema.type must be"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": 5}}}},
            "output_config.format.schema: type must",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result",
                                                        "tool_use_id": 5}]}]},
            "messages[0].content[0].tool_use_id must be a string",
        ),
    ],
)  # fmt: skip
def test_messages(shared_gateway: Running, more: dict[str, Any], said: str, retry: bool) -> None:
    asked = {"model": "policy", "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]}
    error = refused(shared_gateway, "/messages", asked | more, retry)
    assert error["message"].startswith(said)


def part(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [fields]}]}


CHAT: list[tuple[dict[str, Any], str]] = [
    ({"messages": [1]}, "messages[0]"),
    ({"messages": {"role": "user"}}, "messages"),
    ({"messages": [{"role": [], "content": "h"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": {}}]}, "messages[0].content"),
    (part(type=[], text="x"), "messages[0].content[0].type"),
    (part(type={}, text="x"), "messages[0].content[0].type"),
    (part(type="text", text=[]), "messages[0].content[0].text"),
    ({"messages": [{"role": "assistant", "tool_calls": [[]]}]}, "messages[0].tool_calls[0]"),
    ({"tools": 5}, "tools"),
    ({"tools": [1]}, "tools[0]"),
    ({"tools": [{"type": "function", "function": 1}]}, "tools[0].function"),
    ({"tools": [{"type": {}}]}, "tools[0].type"),
    ({"tool_choice": []}, "tool_choice"),
    ({"response_format": {"type": []}}, "response_format.type"),
    ({"response_format": {"type": "json_schema", "json_schema": 3}}, "response_format.json_schema"),
    ({"temperature": "hot"}, "temperature"),
    ({"stop": {}}, "stop"),
    ({"stop": [[]]}, "stop[0]"),
    ({"logit_bias": 3}, "logit_bias"),
    ({"seed": []}, "seed"),
    ({"max_tokens": "9"}, "max_tokens"),
]
ELSEWHERE: list[tuple[dict[str, Any], str]] = [
    (part(type="image_url", image_url=5), "messages[0].content[0].image_url"),
    (part(type="input_audio", input_audio="x"), "messages[0].content[0].input_audio"),
    ({"functions": [1]}, "functions[0]"),
    ({"web_search_options": 3}, "web_search_options"),
]


def post(gateway: Running, path: str, body: dict[str, Any]) -> httpx.Response:
    claim = gateway.claims[0]
    headers = {"x-api-key": claim.key}
    return httpx.post(f"{gateway.base_url(claim)}/{path}", json=body, headers=headers, timeout=60)


def elsewhere(start: Any, provider: FaultyServer, model: str = "openai/x", **more: Any) -> Running:
    one = ProviderModel(model, provider.url, SECRET, num_retries=0, **more)
    return start(provider_models={"o": one})


def assert_names(answer: httpx.Response, field: str) -> None:
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == field, error
    assert field in error["message"]


@pytest.mark.parametrize(("body", "field"), CHAT, ids=str)
def test_our_model(shared_gateway: Running, body: dict[str, Any], field: str) -> None:
    asked = {"model": "policy", "messages": HI} | body
    assert_names(post(shared_gateway, "chat/completions", asked), field)
    assert shared_gateway.stats["accepted"] == 0


def test_a_providers_model(start: Any) -> None:
    provider = FaultyServer((200, said("x")))
    gateway = elsewhere(start, provider)
    for body, field in CHAT + ELSEWHERE:
        asked = {"model": "o", "messages": HI} | body
        assert_names(post(gateway, "chat/completions", asked), field)
    for path, body, field in (
        ("completions", {"prompt": "x", "stop": 4}, "stop"),
        ("completions", {"prompt": "x", "temperature": []}, "temperature"),
        ("responses", {"input": "h", "temperature": "hot"}, "temperature"),
    ):
        assert_names(post(gateway, path, {"model": "o"} | body), field)
    refused = post(gateway, "messages", {"model": "o", "max_tokens": "x", "messages": HI})
    assert (refused.status_code, "max_tokens" in refused.text) == (400, True)
    assert provider.seen == []
    assert gateway.stats["accepted"] == 0
    # What only a provider can judge goes on to it.
    for body in (
        {"temperature": 7.5, "logit_bias": {"5": 400}, "stop": ["x"] * 30},
        {"tools": [{"type": "web_search"}], "response_format": {"type": "grammar"}},
        part(type="image_url", image_url={"url": "https://nowhere/x.png"}),
        part(type="video_url", video_url={"url": "https://nowhere/x.mp4"}),
    ):
        assert post(gateway, "chat/completions", {"model": "o", "messages": HI} | body).is_success
