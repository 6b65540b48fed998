"""Broken requests in every protocol: whatever the JSON, an answer or a refusal, never a 500."""

from __future__ import annotations

import copy
import random
from typing import Any

import httpx
import pytest
from scripted_sampler import Running

TOOL = {"type": "object", "properties": {"q": {"type": "string"}}}
BODIES: dict[str, dict[str, Any]] = {
    "completions": {
        "model": "policy", "prompt": ["One", "Two"], "n": 2, "logprobs": 1, "echo": False,
        "stop": ["x"], "stream": False, "stream_options": {"include_usage": True}, "seed": 3,
    },
    "responses": {
        "model": "policy", "instructions": "s", "stream": False, "max_output_tokens": 9,
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": "h"}]},
            {"type": "message", "role": "assistant", "id": "m", "status": "completed",
             "content": [{"type": "output_text", "text": "yo", "annotations": []}]},
            {"type": "function_call", "id": "f", "call_id": "c", "name": "search",
             "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "one"},
        ],
        "tools": [{"type": "function", "name": "search", "parameters": TOOL, "strict": True}],
        "tool_choice": {"type": "function", "name": "search"}, "parallel_tool_calls": True,
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
        "reasoning": {"effort": "low", "summary": "auto"}, "metadata": {"a": "b"},
        "include": ["message.output_text.logprobs"], "top_logprobs": 1,
    },
    "messages": {
        "model": "policy", "max_tokens": 9, "stream": False, "stop_sequences": ["x"],
        "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "h", "signature": "s"},
                {"type": "text", "text": "yo"},
                {"type": "tool_use", "id": "c", "name": "search", "input": {"q": 1}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "c", "is_error": True,
                 "content": [{"type": "text", "text": "one"}]},
                {"type": "text", "text": "and?"},
            ]},
        ],
        "tools": [{"name": "search", "description": "d", "input_schema": TOOL}],
        "tool_choice": {"type": "tool", "name": "search", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 1024}, "metadata": {"user_id": "u"},
        "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
    },
}  # fmt: skip
VALUES: list[Any] = [
    None, True, False, 0, -1, 3, 10**30, 1e300, "", "x", "\x00", [], {}, [None], [[]], ["x"], [{}],
    [1, "x"], {"type": "x"}, {"type": None}, {"type": "text"},
]  # fmt: skip


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) in a JSON value."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    found: list[tuple[Any, Any]] = []
    for key, inner in pairs:
        found.append((value, key))
        if isinstance(inner, dict | list):
            found += places(inner)
    return found


def mutated(body: dict[str, Any], dice: random.Random) -> dict[str, Any]:
    body = copy.deepcopy(body)
    for _ in range(dice.choice([1, 1, 1, 2])):
        container, key = dice.choice(places(body))
        if dice.random() < 0.25:
            del container[key]
        else:
            container[key] = copy.deepcopy(dice.choice(VALUES))
        if not body:
            break
    return body


@pytest.mark.parametrize("path", ["completions", "responses", "messages", "messages/count_tokens"])
def test_no_body_breaks_the_gateway(gateway: Running, path: str) -> None:
    gateway.sampler.script = lambda *_: "ok"
    dice = random.Random(path)
    claim = gateway.claims[0]
    url = f"{gateway.base_url(claim)}/{path}"
    good = BODIES[path.split("/")[0]]
    statuses = set[int]()
    with httpx.Client(headers={"x-api-key": claim.key}, timeout=30) as client:
        first = client.post(url, json=good)
        assert first.status_code == 200, first.text
        for _ in range(400):
            body = mutated(good, dice)
            answer = client.post(url, json=body)
            statuses.add(answer.status_code)
            assert answer.status_code in (200, 400, 404), (body, answer.text)
            if answer.status_code == 400:
                assert answer.json()["error"]["message"]
            if body.get("stream") is True and answer.status_code == 200:
                assert "text/event-stream" in answer.headers["content-type"]
    assert statuses >= {200, 400}
    assert gateway.store.accounting(gateway.run_id).adds_up
