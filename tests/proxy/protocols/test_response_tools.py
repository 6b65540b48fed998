"""Tools of the Responses API that are no functions, with the official client."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import openai
import pytest
from official_clients import SCHEMA, claude, client
from scripted_sampler import Running

GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
FUNCTION = {"type": "function", "name": "spawn", "parameters": SCHEMA, "strict": False}
PATCH = {"type": "custom", "name": "patch", "description": "Edits files.", "format": GRAMMAR}
TEAM = {"type": "namespace", "name": "team", "description": "Sub-agents.", "tools": [FUNCTION]}
TOOLS: Any = [PATCH, TEAM, {"type": "local_shell"}]
CALLS: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "custom": ("patch", {"input": "*** Begin\n+é"}, {"name": "patch", "input": "*** Begin\n+é"}),
    "namespace": (
        "team__spawn", {"q": "x"}, {"name": "spawn", "namespace": "team", "arguments": '{"q": "x"}'}
    ),
    "shell": (
        "local_shell", {"command": ["ls"]},
        {"action": {"type": "exec", "command": ["ls"], "env": {}}},
    ),
}  # fmt: skip


def said(name: str, arguments: Any) -> str:
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"I go on.\n<tool_call>\n{call}\n</tool_call>"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", CALLS)
def test_a_call_comes_and_goes_as_its_own_kind(gateway: Running, kind: str, stream: bool) -> None:
    name, arguments, expected = CALLS[kind]
    gateway.sampler.script = lambda *_: said(name, arguments)
    asked: list[Any] = [{"role": "user", "content": "Go."}]
    with client(gateway, gateway.claims[0]) as api:
        made: Any = api.responses.create(model="policy", input=asked, tools=TOOLS, stream=stream)
        if stream:
            events = list(made)
            made = events[-1].response
            done = [e.item for e in events if e.type == "response.output_item.done"]
            assert done == made.output
            typed = [e.delta for e in events if e.type == "response.custom_tool_call_input.delta"]
            assert typed == ([arguments["input"]] if kind == "custom" else [])
        call = made.output[-1].model_dump(exclude_none=True)
        assert {key: call[key] for key in expected} == expected
        asked += [item.model_dump(exclude_none=True) for item in made.output]
        output = {
            "custom": "custom_tool_call_output", "namespace": "function_call_output",
            "shell": "local_shell_call_output",
        }  # fmt: skip
        asked.append({"type": output[kind], "call_id": call["call_id"], "output": "done"})
        api.responses.create(model="policy", input=asked, tools=TOOLS)
    first, second = gateway.calls(gateway.claims[0])
    assert second.params["continued"] is True
    before = [*first.prompt_ids, *first.response_ids]
    assert second.prompt_ids[: len(before)] == before
    assert first.params["not_enforced"] == ["grammar of patch"]
    prompt = gateway.renderer.decode_raw(first.prompt_ids)
    assert "Sub-agents." in prompt
    assert GRAMMAR["definition"] in prompt


def test_hosted_tools_are_refused_by_default(gateway: Running) -> None:
    tools: Any = [{"type": "web_search"}, FUNCTION]
    with client(gateway) as api, pytest.raises(openai.BadRequestError, match="leave_out_tools"):
        api.responses.create(model="policy", input="x", tools=tools)


def test_hosted_tools_are_left_out_and_noted(start: Callable[..., Running]) -> None:
    gateway = start(leave_out_tools=True)
    hosted: Any = {"type": "web_search_20250305", "name": "web_search"}
    own: Any = {"name": "search", "input_schema": SCHEMA}
    asked: Any = [{"role": "user", "content": "x"}]
    tools: Any = [{"type": "web_search"}, FUNCTION]
    with client(gateway) as api:
        api.responses.create(model="policy", input="x", tools=tools)
    with claude(gateway) as api:
        counted = api.messages.count_tokens(model="policy", messages=asked, tools=[hosted, own])
        made = api.messages.create(
            model="policy", max_tokens=5, messages=asked, tools=[hosted, own]
        )
    assert counted.input_tokens == made.usage.input_tokens
    responses, messages = gateway.calls(gateway.claims[0])
    assert responses.params["left_out"] == ["web_search"]
    assert messages.params["left_out"] == ["web_search_20250305"]
    for call in (responses, messages):
        assert "web_search" not in gateway.renderer.decode_raw(call.prompt_ids)
        assert call.request is not None
        assert "web_search" in json.dumps(call.request["tools"])  # recorded as sent
