"""Convert requests of the Responses and Messages APIs to chat completions.

For our own model, knows the items and content blocks that responses.py and messages.py accept. For
a provider's model LiteLLM converts, which reads what providers take besides (images, their own
tools); its functions for that are private, so litellm is pinned exactly. Answers are not converted
here: through LiteLLM they lost ids, usage, the order of events, stop sequences, log-probs and
parallel tool calls, so responses.py and messages.py write them.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

from agentrl_proxy.errors import invalid

Message = dict[str, Any]

_SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "seed")
_FUNCTION = ("name", "description", "parameters", "strict")  # OpenAI's order


def chat_of_response(raw: dict[str, Any]) -> dict[str, Any]:
    """Return a checked Responses request as a chat request."""
    messages: list[Message] = []
    if raw.get("instructions"):
        messages.append({"role": "system", "content": raw["instructions"]})
    items = raw["input"]
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    thoughts: list[str] = []  # they begin the assistant's next message
    for item in [*items, None]:
        if item is not None and item.get("type") == "reasoning":
            thoughts += _thoughts(item)
            continue
        said = None if item is None else _said(item)
        if said is not None and said["role"] == "assistant":
            _join(messages, said, thoughts)
        else:
            if thoughts:
                messages.append(_with_thoughts({"role": "assistant", "content": None}, thoughts))
            messages += [] if said is None else [said]
        thoughts = []
    tools = [_tool(tool, tool.get("parameters")) for tool in raw.get("tools") or ()]
    choice = raw.get("tool_choice")
    if isinstance(choice, dict):
        choice = {"type": "function", "function": {"name": choice["name"]}}
    format = (raw.get("text") or {}).get("format")
    if format is not None and format["type"] == "json_schema":
        schema = {k: format[k] for k in ("name", "schema", "strict") if format.get(k) is not None}
        format = {"type": "json_schema", "json_schema": schema}
    chat = {
        "model": raw["model"],
        "messages": messages,
        "max_tokens": raw.get("max_output_tokens"),
        "temperature": raw.get("temperature"),
        "top_p": raw.get("top_p"),
        "response_format": format,
    }
    if tools:
        chat |= {"tools": tools, "tool_choice": choice}
        chat["parallel_tool_calls"] = raw.get("parallel_tool_calls")
    return {name: value for name, value in chat.items() if value is not None}


def chat_of_messages(raw: dict[str, Any]) -> dict[str, Any]:
    """Return a checked Messages request as a chat request."""
    messages: list[Message] = []
    if raw.get("system"):
        messages.append({"role": "system", "content": raw["system"]})
    for message in raw["messages"]:
        messages += _of_blocks(message["role"], message["content"])
    tools = [_tool(tool, tool["input_schema"]) for tool in raw.get("tools") or ()]
    choice = raw.get("tool_choice") or {}
    chosen: Any = {"any": "required"}.get(choice.get("type", ""), choice.get("type"))
    if chosen == "tool":
        chosen = {"type": "function", "function": {"name": choice["name"]}}
    chat = {
        "model": raw["model"],
        "messages": messages,
        "tools": tools or None,
        "tool_choice": chosen,
        "stop": raw.get("stop_sequences") or None,
        **{name: raw.get(name) for name in _SAMPLING},
    }
    return {name: value for name, value in chat.items() if value is not None}


def _tool(tool: dict[str, Any], parameters: dict[str, Any] | None) -> dict[str, Any]:
    function = {**tool, "parameters": parameters}
    kept = {name: function[name] for name in _FUNCTION if function.get(name) is not None}
    return {"type": "function", "function": kept}


def _call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


# --- Responses


def _said(item: dict[str, Any]) -> Message:
    """Return an input item as a message."""
    match item.get("type"):
        case "function_call":
            call = _call(item["call_id"], item["name"], item["arguments"])
            return {"role": "assistant", "content": None, "tool_calls": [call]}
        case "function_call_output":
            content = _text(item["output"])
            return {"role": "tool", "tool_call_id": item["call_id"], "content": content}
        case _:
            return {"role": item["role"], "content": _text(item["content"])}


def _join(messages: list[Message], said: Message, thoughts: list[str]) -> None:
    """Add what the assistant said: calls and text of one turn are items of their own."""
    last: Message = messages[-1] if messages else {"role": "user"}
    if last["role"] != "assistant" or thoughts:
        messages.append(_with_thoughts(said, thoughts))
    elif calls := said.get("tool_calls"):
        last["tool_calls"] = [*last.get("tool_calls", ()), *calls]
    elif last.get("tool_calls"):
        last["content"] = (last["content"] or "") + said["content"]
    else:
        messages.append(said)


def _with_thoughts(message: Message, thoughts: Iterable[str]) -> Message:
    thought = "\n".join(thoughts)
    return {**message, "reasoning_content": thought} if thought else message


def _thoughts(item: dict[str, Any]) -> list[str]:
    """Return the texts of a reasoning item: ``content`` of open models, else ``summary``."""
    for name in ("content", "summary"):
        parts = item.get(name)
        parts = [one for one in parts if isinstance(one, dict)] if isinstance(parts, list) else []
        if texts := [one["text"] for one in parts if isinstance(one.get("text"), str)]:
            return texts
    return []


def _text(content: str | list[dict[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    return "".join(one.get("text") or one.get("refusal") or "" for one in content)


# --- Messages


def _of_blocks(role: str, content: str | list[dict[str, Any]]) -> list[Message]:
    """Return the messages of one turn: results of tools come before the user's text."""
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    results: list[Message] = []
    calls: list[dict[str, Any]] = []
    texts: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for block in content:
        match block["type"]:
            case "tool_result":
                said, call_id = block.get("content") or "", block["tool_use_id"]
                results.append({"role": "tool", "tool_call_id": call_id, "content": said})
            case "tool_use":
                calls.append(_call(block["id"], block["name"], json.dumps(block["input"])))
            case "text":
                texts.append({"type": "text", "text": block["text"]})
            case "thinking":
                thoughts.append(block["thinking"])
            case _:  # redacted thinking, which our model does not write
                pass
    if role != "assistant":
        return [*results, {"role": role, "content": texts}] if texts else results
    message = {"role": role, "content": "".join(one["text"] for one in texts)}
    message |= {"tool_calls": calls} if calls else {}
    return [_with_thoughts(message, thoughts)]


# --- by LiteLLM


@cache
def translators() -> tuple[Any, Any]:
    """Import LiteLLM, which takes seconds, and return its translators of Messages and of Responses
    requests."""
    # Else LiteLLM fetches its price list over the network, and reads the folder's .env file.
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    os.environ.setdefault("LITELLM_MODE", "PRODUCTION")
    import litellm.responses.main  # noqa: F401  # pyright: ignore[reportUnusedImport]
    from litellm.llms.anthropic.pass_through.adapters.transformation import AnthropicAdapter
    from litellm.responses.litellm_completion_transformation.transformation import (
        LiteLLMCompletionResponsesConfig,
    )

    return AnthropicAdapter(), LiteLLMCompletionResponsesConfig


def provider_chat_of_messages(
    raw: dict[str, Any], provider_model: str
) -> tuple[dict[str, Any], dict[str, str]]:
    """Translate a Messages request.

    Args:
        provider_model: LiteLLM's name (provider/model) of the model that answers. Thinking and
            cache marks are translated for this model.

    Returns:
        The chat request, and the full names of tools by the shortened ones.

    Raises:
        ApiError: LiteLLM cannot read the request (400).
    """
    known = {k: v for k, v in raw.items() if k not in ("model", "stream")}
    provider = _provider_of(provider_model)
    with _reading("messages"):
        chat, names = translators()[0].translate_completion_input_params_with_tool_mapping(
            {**known, "model": provider_model}, custom_llm_provider=provider
        )
    return {**chat, "model": raw["model"]}, names


def provider_chat_of_response(raw: dict[str, Any], provider_model: str) -> dict[str, Any]:
    """Translate a Responses request; arguments and errors as with ``provider_chat_of_messages``."""
    provider = _provider_of(provider_model)
    with _reading("input"):
        chat = translators()[1].transform_responses_api_request_to_chat_completion_request(
            model=provider_model,
            input=raw["input"],
            responses_api_request=raw,
            custom_llm_provider=provider,
        )
    return {**chat, "model": raw["model"]}


def _provider_of(provider_model: str) -> str | None:
    provider, slash, _ = provider_model.partition("/")
    return provider if slash else None


@contextlib.contextmanager
def _reading(field: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # LiteLLM trusts its input, so it can raise anything
        text = f"{field} could not be read: {type(error).__name__}: {error}"
        raise invalid(field, text[:500]) from error
