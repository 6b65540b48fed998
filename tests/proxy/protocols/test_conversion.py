"""Responses and Messages to our own model as chat completions: the same as LiteLLM's reading."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from agentrl_proxy.protocols import conversion

FUNCTION = {"name": "search", "description": "d", "parameters": {"type": "object"}}
ASKED: dict[str, Any] = {"model": "m", "tools": [{"type": "function", **FUNCTION}]}
MODEL = "openai/m"  # to which LiteLLM translates without adding anything


def reasoning(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]}


def called(call_id: str) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": "search", "arguments": "{}"}


def said(text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text}
    return {"type": "message", "role": "assistant", "content": [part]}


def test_a_turn_of_several_items_is_one_message() -> None:
    items = [reasoning("t1"), said("a"), called("c1"), called("c2"), said("b"), reasoning("t2")]
    output = {"type": "function_call_output", "call_id": "c1", "output": "r"}
    chat = conversion.chat_of_response({**ASKED, "input": [*items, called("c3"), output]})
    first, second, result = chat["messages"]
    assert (first["reasoning_content"], first["content"]) == ("t1", "ab")
    assert [call["id"] for call in first["tool_calls"]] == ["c1", "c2"]
    assert (second["reasoning_content"], second["content"]) == ("t2", None)
    assert [call["id"] for call in second["tool_calls"]] == ["c3"]
    assert result == {"role": "tool", "tool_call_id": "c1", "content": "r"}


def test_reasoning_that_nothing_follows_is_a_turn() -> None:
    items = [reasoning("t1"), {"role": "user", "content": "u"}, reasoning("t2")]
    messages = conversion.chat_of_response({"model": "m", "input": items})["messages"]
    assert [one.get("reasoning_content") for one in messages] == ["t1", None, "t2"]
    assert [one["role"] for one in messages] == ["assistant", "user", "assistant"]


def test_what_litellm_changed_stays() -> None:
    """A system message amid the talk, and names of tools that are longer than OpenAI's."""
    messages = [{"role": role, "content": "x"} for role in ("user", "assistant", "system", "user")]
    tool = {"name": "n" * 100, "input_schema": {"type": "object"}}
    chat = conversion.chat_of_messages({"model": "m", "messages": messages, "tools": [tool]})
    assert [one["role"] for one in chat["messages"]] == ["user", "assistant", "system", "user"]
    assert chat["tools"][0]["function"]["name"] == "n" * 100


def _items(chance: random.Random) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    for i in range(chance.randrange(1, 7)):
        parts = [{"type": "input_text", "text": f"p{i}"}, {"type": "input_text", "text": "q"}]
        user = {"role": "user", "content": chance.choice([f"u{i}", parts])}
        thought = [reasoning(f"t{i}"), chance.choice([said(f"a{i}"), called(f"c{i}")])]
        output = {"type": "function_call_output", "call_id": f"o{i}", "output": parts}
        turns = [[user], [said(f"a{i}")], thought, [called(f"c{i}")], [called(f"o{i}"), output]]
        items += chance.choice(turns)
    return items


def _messages(chance: random.Random) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for i in range(chance.randrange(1, 6)):
        text = {"type": "text", "text": f"x{i}"}
        used = {"type": "tool_use", "id": f"c{i}", "name": "search", "input": {"q": i}}
        thought = {"type": "thinking", "thinking": f"t{i}", "signature": "s"}
        result = {"type": "tool_result", "tool_use_id": f"c{i}", "content": [text, text]}
        role = "assistant" if i % 2 else "user"
        blocks = [text, used, thought] if i % 2 else [text, result]
        content = chance.choices(blocks, k=chance.randrange(1, 4))
        messages.append({"role": role, "content": chance.choice([content, f"s{i}"])})
    return messages


def _read(chat: dict[str, Any]) -> list[Any]:
    """What a template sees of the messages."""
    seen: list[Any] = []
    for one in chat["messages"]:
        content = one.get("content") or ""
        if not isinstance(content, str):
            content = "".join(part["text"] for part in content)
        functions = [call["function"] for call in one.get("tool_calls") or ()]
        calls = [(call["name"], json.loads(call["arguments"])) for call in functions]
        seen.append((one["role"], content, one.get("reasoning_content"), calls))
    return seen


@pytest.mark.parametrize("seed", range(40))
def test_messages_are_those_of_litellm(seed: int) -> None:
    chance = random.Random(seed)
    response = {**ASKED, "input": _items(chance), "instructions": "i"}
    ours = conversion.chat_of_response(json.loads(json.dumps(response)))
    assert _read(ours) == _read(conversion.provider_chat_of_response(response, MODEL))
    asked = {"model": "m", "max_tokens": 4, "messages": _messages(chance), "system": "s"}
    ours = conversion.chat_of_messages(json.loads(json.dumps(asked)))
    assert _read(ours) == _read(conversion.provider_chat_of_messages(asked, MODEL)[0])
