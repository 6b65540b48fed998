"""Errors name the field that is wrong, as the client's protocol calls it."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from gateway_client import BODIES, post
from provider_servers import SECRET, FaultyServer, said
from scripted_sampler import Running

from agentrl_proxy.dependencies import ProviderModel

USER = {"role": "user", "content": "h"}
LONG = "a b " * 3000
WRONG: dict[str, Any] = {"type": "object", "properties": {"a": {"type": 7}}}
TOOL: dict[str, Any] = {"type": "function", "name": "f", "parameters": {"type": "object"}}
CLAUDE_TOOL: dict[str, Any] = {"name": "f", "input_schema": {"type": "object"}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aa"}}


def told(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [*parts]}]}


CALLED: dict[str, Any] = {
    "messages": [
        USER,
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}],
        },
    ]
}


def shown(*parts: Any) -> dict[str, Any]:
    """A tool's result with these parts."""
    result = {"type": "tool_result", "tool_use_id": "c", "content": [*parts]}
    return {"role": "user", "content": [result]}


def item(**fields: Any) -> dict[str, Any]:
    return {"input": [fields]}


def schema(**more: Any) -> dict[str, Any]:
    return {"text": {"format": {"type": "json_schema", "name": "x", "schema": {}} | more}}


def forced(**more: Any) -> dict[str, Any]:
    return {"tools": [TOOL | more], "tool_choice": "required"}


def claude_forced(**more: Any) -> dict[str, Any]:
    return {"tools": [CLAUDE_TOOL | more], "tool_choice": {"type": "any"}}


def claude_schema(schema: Any) -> dict[str, Any]:
    return {"output_config": {"format": {"type": "json_schema", "schema": schema}}}


RESPONSES: list[tuple[dict[str, Any], str, str]] = [
    ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens must be an integer"),
    ({"input": LONG}, "input", "the prompt is too long: 6"),
    (item(role="user", content=[{"text": "Hi"}, {}]), "input[0].content[1].text", "a string"),
    (schema(schema={"type": 5}), "text.format", "text.format.schema: type must"),
    (schema(strict="x"), "text.format.strict", "text.format.strict must be true or false"),
    (forced(strict="x"), "tools[0].strict", "tools[0].strict must be true or false"),
    (forced(parameters="x"), "tools[0].parameters", "tools[0].parameters must be an object"),
    (forced(parameters=WRONG), "tools[0].parameters", "tools[0].parameters: type must be"),
    (forced(name="a b"), "tools[0].name", "tools[0].name must be of the letters"),
    ({"tools": [TOOL], "tool_choice": {"type": "x"}}, "tool_choice.type", "one of function"),
    ({"model": 3}, "model", "a non-empty string"),
    ({"input": None}, "input", "list of items"),
    ({"input": []}, "input", "a non-empty list"),
    ({"input": ["x"]}, "input[0]", "an object"),
    (item(role="robot", content="x"), "input[0].role", "one of user"),
    (item(role="user"), "input[0].content", "a string or a list"),
    (item(role="user", content=[{"type": "input_image"}]), "input[0].content[0]", "text only"),
    (item(type="web_search_call"), "input[0].type", "one of message"),
    (item(type="function_call", name="x"), "input[0].call_id", "a string"),
    (item(type="function_call_output", call_id="x", output=""), "input[0].call_id", "before it"),
    ({"previous_response_id": "r"}, "previous_response_id", "not found"),
    ({"previous_response_id": "resp_" + 24 * "0"}, "previous_response_id", "not found"),
    ({"previous_response_id": 3}, "previous_response_id", "not found"),
    (item(type="item_reference", id="msg_" + 24 * "0"), "input[0].id", "not found"),
    ({"conversation": "conv_1"}, "conversation", "with store: false"),
    ({"background": True}, "background", "background: false"),
    ({"tools": [{"type": "web_search"}]}, "tools[0]", "no built-in tools"),
    ({"tools": "x"}, "tools", "a list"),
    ({"tools": [{"type": "function"}]}, "tools[0].name", "a non-empty string"),
    ({"instructions": 3}, "instructions", "a string"),
    ({"temperature": 9}, "temperature", "a number from 0 to 2"),
    ({"stream": "yes"}, "stream", "true or false"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type", "one of text"),
    ({"max_tool_calls": True}, "max_tool_calls", "an integer"),
    ({"truncation": 1}, "truncation", "one of auto"),
    ({"store": "x"}, "store", "true or false"),
]
MESSAGES: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens must be an integer"),
    ({"max_tokens": 2**31}, "max_tokens must be an integer from 1 to 2147483647"),
    ({"top_k": 2**63}, "top_k must be an integer up to 2147483647"),
    ({"stop_sequences": [5]}, "stop_sequences[0] must be a non-empty string"),
    ({"stop_sequences": "x"}, "stop_sequences"),
    ({"tool_choice": {"type": "any"}}, "tool_choice 'any' needs tools"),
    ({"tool_choice": "any"}, "tool_choice"),
    (claude_forced(name="a b"), "tools[0].name must be of the letters"),
    (claude_forced(input_schema=WRONG), "tools[0].input_schema: type must be"),
    (claude_forced(input_schema={"type": "string"}), "tools[0].input_schema.type must be"),
    (claude_schema({"type": 5}), "output_config.format.schema: type must"),
    ({"output_config": {"format": {"type": "json"}}}, "output_config.format"),
    ({"output_config": 3}, "output_config"),
    (told({"type": "tool_result", "tool_use_id": 5}), "messages[0].content[0].tool_use_id must be"),
    ({"model": 3}, "model"),
    ({"messages": []}, "messages"),
    ({"messages": ["x"]}, "messages[0]"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    (told(IMAGE), "messages[0].content[0]"),
    (told(IMAGE), "text only"),
    (told({"type": "document", "source": IMAGE["source"]}), "messages[0].content[0]"),
    (CALLED | {"messages": [*CALLED["messages"], shown(IMAGE)]}, "messages[2].content[0]"),
    (told({"type": "x"}), "messages[0].content[0]"),
    ({"messages": [USER, {"role": "assistant", "content": "I am"}]}, "the last message must be"),
    ({"messages": [{"role": "user", "content": LONG}]}, "the prompt is too long: 6"),
    ({"system": 3}, "system"),
    ({"temperature": "hot"}, "temperature"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
    ({"tools": [{"name": "x"}]}, "tools[0].input_schema"),
    ({"stream": "yes"}, "stream"),
    ({"mcp_servers": [{"type": "url", "url": "http://x", "name": "x"}]}, "mcp_servers"),
    ({"container": "c"}, "container"),
]
COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"suffix": "end"}, "suffix"),
    ({"best_of": 3}, "best_of"),
    ({"echo": True, "logprobs": 1}, "echo"),
    ({"echo": True, "logprobs": 1, "stream": True}, "stream"),
    ({"echo": "yes"}, "echo"),
    ({"logprobs": 99}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"temperature": 9}, "temperature"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": [1, "x"]}, "prompt"),
    ({"prompt": [10**9]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": ["x"] * 100, "n": 2}, "prompt"),
    ({"prompt": ["x", "word " * 3000]}, "prompt"),
    ({"model": ""}, "model"),
    ({"stream": 1}, "stream"),
]
CHAT: list[tuple[dict[str, Any], str]] = [
    ({"messages": [1]}, "messages[0]"),
    ({"messages": {"role": "user"}}, "messages"),
    ({"messages": [{"role": [], "content": "h"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": {}}]}, "messages[0].content"),
    (told({"type": [], "text": "x"}), "messages[0].content[0].type"),
    (told({"type": {}, "text": "x"}), "messages[0].content[0].type"),
    (told({"type": "text", "text": []}), "messages[0].content[0].text"),
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
PROVIDERS: list[tuple[dict[str, Any], str]] = [
    (told({"type": "image_url", "image_url": 5}), "messages[0].content[0].image_url"),
    (told({"type": "input_audio", "input_audio": "x"}), "messages[0].content[0].input_audio"),
    ({"functions": [1]}, "functions[0]"),
    ({"web_search_options": 3}, "web_search_options"),
]
CASES = [
    *(("responses", *case) for case in RESPONSES),
    *(("messages", more, None, message) for more, message in MESSAGES),
    *(("completions", more, field, "") for more, field in COMPLETIONS),
    *(("chat/completions", more, field, field) for more, field in CHAT),
]


def ask(gateway: Running, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
    claim = gateway.claims[0]
    asked = {"model": "policy"} | BODIES[path] | body
    return post(f"{gateway.base_url(claim)}/{path}", claim.key, asked, headers=headers)


@pytest.mark.parametrize(("path", "more", "field", "message"), CASES, ids=str)
def test_our_model(
    shared_gateway: Running, path: str, more: dict[str, Any], field: str | None, message: str
) -> None:
    # A retry is refused later: when the answer of the request that it repeats was looked for.
    for headers in ({}, {"x-stainless-retry-count": "1"}):
        answer = ask(shared_gateway, path, more, **headers)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert message in error["message"]
        if field is None:
            assert error["type"] == "invalid_request_error"
            assert answer.json()["type"] == "error"
        else:
            assert error["param"] == field, error
    assert shared_gateway.stats["accepted"] == 0
    assert shared_gateway.calls(shared_gateway.claims[0]) == []


def test_a_providers_model(start: Any) -> None:
    provider = FaultyServer((200, said("x")))
    one = ProviderModel("openai/x", provider.url, SECRET, num_retries=0)
    gateway: Running = start(provider_models={"o": one})
    for path, body, field in (
        *(("chat/completions", *case) for case in CHAT + PROVIDERS),
        ("completions", {"stop": 4}, "stop"),
        ("completions", {"temperature": []}, "temperature"),
        ("responses", {"temperature": "hot"}, "temperature"),
        ("messages", {"max_tokens": "x"}, None),
    ):
        answer = ask(gateway, path, {"model": "o"} | body)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error.get("param") == field, error
        assert (field or "max_tokens") in error["message"]
    assert provider.seen == []
    assert gateway.stats["accepted"] == 0
    # What only a provider can judge goes on to it.
    for body in (
        {"temperature": 7.5, "logit_bias": {"5": 400}, "stop": ["x"] * 16},
        {"tools": [{"type": "web_search"}], "response_format": {"type": "grammar"}},
        told({"type": "image_url", "image_url": {"url": "https://nowhere/x.png"}}),
        told({"type": "video_url", "video_url": {"url": "https://nowhere/x.mp4"}}),
    ):
        assert ask(gateway, "chat/completions", {"model": "o"} | body).is_success
