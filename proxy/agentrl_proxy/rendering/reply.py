"""Define a parsed reply and its tool calls, and read JSON calls, whose spelling is kept."""

from __future__ import annotations

import json
import re
import secrets
from dataclasses import dataclass, field
from typing import Any

import orjson

# The usual order of keys; Llama says parameters.
_CALL = re.compile(
    r'\s*\{(?:\s*"type"\s*:\s*"function"\s*,)?\s*"name"\s*:\s*(?P<name>"(?:[^"\\]|\\.)+")\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*(?=\{\s*["}])'
)
_DECODER = json.JSONDecoder()


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: str  # JSON, as the model spelled it
    # Tool results refer to it.
    id: str = field(default_factory=new_call_id, compare=False)

    def as_dict(self) -> dict[str, Any]:
        """Return the call as chat completions have it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(slots=True)
class ParsedReply:
    """A whole reply, or a piece of one."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list[ToolCall])
    first_call: int = 0  # of a piece: the index of its first call in the reply


def read_call(text: str, name: str | None, *, delimited: bool) -> ToolCall:
    """Return the call ``{"name": ..., "arguments": {...}}``, or the arguments alone after a name.

    Args:
        name: the name, if it stands before the JSON; None: it is in the JSON.
        delimited: whether the text stood between delimiters; else only its arguments tell a call
            from an answer in JSON.

    Raises:
        ValueError: it is malformed.
    """
    if name is not None:
        return tool_call(name, text)
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("a tool call nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("a tool call is not an object")
    named = [value[key] for key in ("arguments", "parameters") if key in value]
    if len(named) > 1:
        raise ValueError("a tool call with arguments and parameters")
    if not (named or delimited):
        raise ValueError("an object without arguments")
    arguments = (named or ["{}"])[0]
    if (begun := _CALL.match(text)) is not None:
        spelled, end = _DECODER.raw_decode(text, begun.end())
        if [value["name"], arguments] != [json.loads(begun["name"]), spelled]:
            raise ValueError("a tool call with two names or arguments")
        arguments = text[begun.end() : end]
    return tool_call(value.get("name"), arguments)


def tool_call(name: Any, arguments: Any) -> ToolCall:
    """Return a checked call. Its arguments may be JSON text, whose spelling is kept.

    Raises:
        ValueError: name or arguments are malformed.
    """
    if not isinstance(name, str) or not name:
        raise ValueError("a tool call without a name")
    name.encode()  # no lone surrogate
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    arguments = arguments.strip()
    # Stricter than json, which takes NaN.
    if not isinstance(orjson.loads(arguments), dict):
        raise ValueError("a tool call's arguments are not an object")
    return ToolCall(name, arguments)
