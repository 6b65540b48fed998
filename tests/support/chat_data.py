"""Chats to train on: the game of examples/hello, and a clerk that looks prices up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "price",
        "description": "Look a price up.",
        "parameters": {"type": "object", "properties": {"item": {"type": "integer"}}},
    },
}


def asked(number: int) -> dict[str, Any]:
    return {"role": "user", "content": f"Let's play a game. Say you are {number}."}


def game(number: int, **more: Any) -> dict[str, Any]:
    answer = {"role": "assistant", "content": f"I am {number}.", **more}
    return {"messages": [asked(number), answer]}


def wanted(item: int) -> dict[str, Any]:
    return {"role": "user", "content": f"What does item {item} cost?"}


def result(item: int, call_id: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": str(item + 1)}


def clerk(item: int) -> dict[str, Any]:
    function = {"name": "price", "arguments": json.dumps({"item": item})}
    call = {"id": "call_1_0", "type": "function", "function": function}
    messages = [
        wanted(item),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        result(item, "call_1_0"),
        {"role": "assistant", "content": f"{item + 1}."},
    ]
    return {"messages": messages, "tools": [TOOL]}


def as_sharegpt(item: int) -> dict[str, Any]:
    """``clerk`` in the other form."""
    said = [
        ("human", f"What does item {item} cost?"),
        ("function_call", json.dumps({"name": "price", "arguments": {"item": item}})),
        ("observation", str(item + 1)),
        ("gpt", f"{item + 1}."),
    ]
    turns = [{"from": role, "value": value} for role, value in said]
    return {"conversations": turns, "tools": json.dumps([TOOL["function"]])}


def write_lines(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in records))
    return path
