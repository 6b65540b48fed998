"""Errors name the field that the client sent, not what its request was translated into."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from scripted_sampler import Running

pytestmark = [  # LiteLLM's use of pydantic
    pytest.mark.filterwarnings("ignore:.*using the `ReadOnly` qualifier:UserWarning"),
    pytest.mark.filterwarnings("ignore:Accessing the 'model_:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Pydantic serializer warnings:UserWarning"),
]

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
