"""Read records as chats: OpenAI's ``messages``, ShareGPT's ``conversations``, or prompts with
completions.

The result is checked as the gateway checks a request, so what is wrong is named by its field.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from agentrl.runs.excerpts import json_line
from agentrl_proxy.errors import ApiError
from agentrl_proxy.protocols.chat import chat_request
from agentrl_tracer.schemas import Json

_ROLES = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant",
    "assistant": "assistant", "model": "assistant", "function_call": "assistant",
    "observation": "tool", "tool": "tool", "function_response": "tool",
}  # fmt: skip
"""By ShareGPT's ``from``."""


@dataclass(frozen=True, slots=True)
class Chat:
    messages: list[Json]
    """In OpenAI's form."""
    tools: list[Json] | None
    weights: list[float | None]
    """Of each message, 0 or more; None where the record gives none."""


def to_chat(data: Json) -> Chat:
    """Read a record as a chat.

    Raises:
        ValueError: names the field that does not fit.
    """
    messages = [_message(one, at) for at, one in enumerate(_messages(data))]
    weights = [_weight(message, at) for at, message in enumerate(messages)]
    asked: Json = {"model": "sft", "messages": messages}
    if tools := _list(data.get("tools") or [], "tools"):  # ShareGPT's are without a type
        bare = [isinstance(one, dict) and "name" in one for one in tools]
        known = zip(tools, bare, strict=True)
        asked["tools"] = [{"type": "function", "function": t} if b else t for t, b in known]
    try:
        checked = chat_request(asked)
    except ApiError as error:
        raise ValueError(error.message) from error
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError("messages: there is no answer of an assistant to train on")
    return Chat(checked.messages, checked.tools, weights)


def turns(value: Any, name: str, role: str) -> list[Any]:
    """Read a part of a conversation: messages, or the text of one, which may look like a number."""
    if isinstance(value, int | float):
        value = json.dumps(value)
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, list):
        raise ValueError(f"{name}: give text, or a list of messages")
    return value


def _messages(data: Json) -> list[Any]:
    """Return the messages of a record in OpenAI's form, not checked yet."""
    if data.get("messages") is not None:
        return with_system(data, _list(data["messages"], "messages"))
    if data.get("conversations") is not None:
        said = _list(data["conversations"], "conversations")
        of_openai = said and isinstance(said[0], dict) and "role" in said[0]
        return with_system(data, said if of_openai else [*_of_sharegpt(said)])
    if data.get("prompt") is not None and data.get("completion") is not None:
        asked = with_system(data, turns(data["prompt"], "prompt", "user"))
        return [*asked, *turns(data["completion"], "completion", "assistant")]
    raise ValueError(
        "there are no messages (OpenAI's form), no conversations (ShareGPT's), and no prompt with "
        f"a completion; it has {', '.join(data) or 'no fields'}"
    )


def with_system(data: Json, messages: list[Any]) -> list[Any]:
    """Put the text in the record's ``system`` before its messages, unless one of theirs begins."""
    begins = messages and isinstance(messages[0], dict) and messages[0].get("role") == "system"
    system = {"role": "system", "content": data.get("system")}
    return [system, *messages] if data.get("system") and not begins else messages


def without_nulls(value: Any) -> Any:
    """Return a value without the fields that are null: in a table every object has those of all."""
    if isinstance(value, dict):
        return {name: without_nulls(one) for name, one in value.items() if one is not None}
    return [without_nulls(one) for one in value] if isinstance(value, list) else value


def _of_sharegpt(said: Iterable[Any]) -> Iterable[Json]:
    waiting: deque[str] = deque()  # ids of calls without a result yet
    for at, one in enumerate(said):
        what = f"conversations[{at}]"
        if not isinstance(one, dict) or not isinstance(one.get("value"), str):
            raise ValueError(f"{what}: give an object with from and value, both texts")
        role = _ROLES.get(str(one.get("from")))
        if role is None:
            raise ValueError(f"{what}.from: {one.get('from')!r} is none of {', '.join(_ROLES)}")
        message: Json = {"role": role, "content": one["value"]}
        if one["from"] == "function_call":
            given = _json(one["value"], f"{what}.value")
            calls = [
                {"id": f"call_{at}_{i}", "type": "function", "function": function}
                for i, function in enumerate(given if isinstance(given, list) else [given])
            ]
            waiting.extend(call["id"] for call in calls)
            message |= {"content": "", "tool_calls": calls}
        elif role == "tool":
            message["tool_call_id"] = waiting.popleft() if waiting else f"call_{at}"
        yield message | {"weight": one.get("weight")}


def _message(given: Any, at: int) -> Json:
    """Return a message without empty fields, tool arguments as text."""
    if not isinstance(given, dict):
        raise ValueError(f"messages[{at}]: give an object with role and content")
    # Parquet gives every message the fields of all.
    message: Json = {name: value for name, value in given.items() if value is not None}
    if "function_call" in message:
        raise ValueError(f"messages[{at}].function_call: give tool_calls in its place")
    if isinstance(message.get("tool_calls"), list):
        message["tool_calls"] = [_tool_call(call) for call in message["tool_calls"]]
        if not message["tool_calls"]:
            del message["tool_calls"]
    return message


def _tool_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    if isinstance(function.get("arguments"), dict):
        function = {**function, "arguments": json_line(function["arguments"])}
    call = {**call, "function": function}
    return {name: value for name, value in call.items() if value is not None}


def _weight(message: Json, at: int) -> float | None:
    """Take a message's weight out of it."""
    weight = message.pop("weight", None)
    if weight is None:
        return None
    if message.get("role") != "assistant":
        raise ValueError(f"messages[{at}].weight: only answers of the assistant train")
    if not isinstance(weight, int | float) or not 0 <= weight < float("inf"):
        raise ValueError(f"messages[{at}].weight: give a number of 0 or more, not {weight!r}")
    return float(weight)


def _list(value: Any, name: str) -> list[Any]:
    """Read a list, which a table may hold as JSON text."""
    value = _json(value, name) if isinstance(value, str) else value
    if not isinstance(value, list):
        raise ValueError(f"{name}: give a list, not {type(value).__name__}")
    return value


def _json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{what}: is text, but no JSON: {error.msg}") from error
