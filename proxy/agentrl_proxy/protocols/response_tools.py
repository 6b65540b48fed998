"""Read the client-side tools of the Responses API as functions, which is all that a model sees.

The functions of a namespace carry its name before theirs. A custom tool takes its text as the
argument ``input``; its grammar stands in the description and is not enforced. The local shell takes
a command. Calls go back to the client as items of the tool's own kind.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from agentrl_proxy.protocols.chat import FUNCTION, MAX_TOOLS
from agentrl_proxy.protocols.fields import NONEMPTY, OBJECT, TEXT, Array, Object, Tagged, text_or

Item = dict[str, Any]

LOCAL_SHELL = "local_shell"
_GRAMMAR = Object(["syntax", "definition"], syntax=TEXT, definition=TEXT)
_FORMAT = Tagged({"text": Object([]), "grammar": _GRAMMAR})
_CUSTOM = Object(["name"], name=NONEMPTY, description=TEXT, format=_FORMAT)
_FUNCTIONS = Array(Tagged({"function": FUNCTION, "custom": _CUSTOM}), maximum=MAX_TOOLS)
TOOLS = {
    "function": FUNCTION,
    "custom": _CUSTOM,
    "namespace": Object(["name", "tools"], name=NONEMPTY, description=TEXT, tools=_FUNCTIONS),
    LOCAL_SHELL: Object([]),
}
"""The tools that a client runs itself, by type."""


def call_items(part: Tagged) -> dict[str, Object]:
    """Return the input items of calls besides ``function_call``, and of their outputs.

    Args:
        part: a content part of an output.
    """
    output = text_or(part)
    return {
        "custom_tool_call": Object(
            ["call_id", "name", "input"], call_id=TEXT, name=TEXT, input=TEXT, namespace=TEXT
        ),
        "custom_tool_call_output": Object(["call_id", "output"], call_id=TEXT, output=output),
        "local_shell_call": Object(["call_id", "action"], call_id=TEXT, action=OBJECT),
        "local_shell_call_output": Object(["output"], id=TEXT, call_id=TEXT, output=output),
    }


def as_functions(raw: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return a checked request with functions and calls of functions only, and the names of the
    tools whose grammar is not enforced."""
    tools = [one for _, one in _functions(raw.get("tools"))]
    free = [tool["name"] for tool in tools if tool.pop("grammar", None)]
    plain = {**raw, "tools": tools} if tools else raw
    if isinstance(raw["input"], list):
        plain = {**plain, "input": [plain_item(item) for item in raw["input"]]}
    return plain, free


def kinds_of(raw: dict[str, Any]) -> dict[str, Item]:
    """Return how a call of each function is written, by the name that the model sees."""
    return {tool["name"]: kind for kind, tool in _functions(raw.get("tools"))}


def call_item(kind: Item, arguments: str) -> Item:
    """Return a call as an item of its kind, without ids."""
    match kind["type"]:
        case "custom_tool_call":
            said = _object(arguments).get("input")
            return {**kind, "input": said if isinstance(said, str) else arguments}
        case "local_shell_call":
            action = {"type": "exec", "command": [], "env": {}, **_object(arguments)}
            return {**kind, "action": action}
        case _:
            return {**kind, "arguments": arguments}


def _functions(
    tools: list[dict[str, Any]] | None, namespace: str | None = None
) -> Iterator[tuple[Item, dict[str, Any]]]:
    """Yield each tool as a function, after how a call of it is written."""
    for tool in tools or ():
        match tool.get("type"):
            case "function":
                yield _kind("function_call", tool, namespace), _named(tool, namespace)
            case "custom":
                yield _kind("custom_tool_call", tool, namespace), _of_text(tool, namespace)
            case "namespace":
                told = tool.get("description") or ""  # the first function tells it
                for kind, inner in _functions(tool["tools"], tool["name"]):
                    texts = [told, inner.get("description") or ""]
                    yield kind, {**inner, "description": "\n\n".join(filter(None, texts))}
                    told = ""
            case "local_shell":
                yield {"type": "local_shell_call"}, _SHELL
            case _:  # left out, see responses.py
                pass


def _kind(kind: str, tool: dict[str, Any], namespace: str | None) -> Item:
    place = {} if namespace is None else {"namespace": namespace}
    return {"type": kind, "name": tool["name"], **place}


def _named(tool: dict[str, Any], namespace: str | None) -> dict[str, Any]:
    return {**tool, "name": _full_name(tool["name"], namespace)}


def _full_name(name: str, namespace: str | None) -> str:
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


def _of_text(tool: dict[str, Any], namespace: str | None) -> dict[str, Any]:
    format, texts = tool.get("format") or {}, [tool.get("description") or ""]
    if grammar := format.get("definition"):
        texts.append(f"The input follows this {format['syntax']} grammar:\n{grammar}")
    made: dict[str, Any] = {
        "type": "function",
        "name": _full_name(tool["name"], namespace),
        "description": "\n\n".join(filter(None, texts)),
        "parameters": {
            "type": "object",
            "properties": {"input": {"type": "string"}},
            "required": ["input"],
        },
    }
    return made | {"grammar": True} if grammar else made


_SHELL: dict[str, Any] = {
    "type": "function",
    "name": LOCAL_SHELL,
    "description": "Runs a command on the user's machine and returns its output.",
    "parameters": {
        "type": "object",
        "properties": {
            "command": {"type": "array", "items": {"type": "string"}},
            "working_directory": {"type": "string"},
            "timeout_ms": {"type": "integer"},
        },
        "required": ["command"],
    },
}


def plain_item(item: Item) -> Item:
    """Return an input item with a function's call or output in place of another tool's."""
    match item.get("type"):
        case "function_call":
            return {**item, "name": _full_name(item["name"], item.get("namespace"))}
        case "custom_tool_call":
            name = _full_name(item["name"], item.get("namespace"))
            return _function_call(item, name, {"input": item["input"]})
        case "local_shell_call":
            action = {k: v for k, v in item["action"].items() if v is not None and k != "type"}
            if not action.get("env"):
                action.pop("env", None)
            return _function_call(item, LOCAL_SHELL, action)
        case "custom_tool_call_output" | "local_shell_call_output":
            call_id = item.get("call_id") or item.get("id") or ""
            return {"type": "function_call_output", "call_id": call_id, "output": item["output"]}
        case _:
            return item


def _function_call(item: Item, name: str, arguments: dict[str, Any]) -> Item:
    call = {"type": "function_call", "call_id": item["call_id"], "name": name}
    return {**call, "arguments": json.dumps(arguments, ensure_ascii=False)}


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
