"""Anthropic's Messages API: what a request may hold, and how an answer and an error are said.

Knows Anthropic's fields, blocks and events. Does not know tokens; LiteLLM reads the request
(translation.py), ChatService or somebody else's model answers it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import orjson

from agentrl_proxy.errors import ApiError, Names, invalid
from agentrl_proxy.protocols import chat_objects, translation
from agentrl_proxy.protocols.chat import ChatRequest, chat_request

_BLOCKS = ("text", "tool_use", "tool_result", "thinking", "redacted_thinking")
# Refused unless empty: the answer would be another one without them.
_UNSUPPORTED = {
    "mcp_servers": "let the agent call them, and send their tools as `tools`",
    "container": "nothing is run here",
}
_FUNCTION = ("name", "description", "parameters", "strict")  # OpenAI's order
_STOP_REASONS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "content_filter": "refusal",
}
_FINISH_REASONS = {said: reason for reason, said in _STOP_REASONS.items()} | {
    "stop_sequence": "stop"
}
# One message may be several of chat's: which it was nobody knows any more.
_NAMES: Names = [
    (re.compile(pattern), own)
    for pattern, own in (
        (r"^max_completion_tokens\b", "max_tokens"),
        (r"^messages\[\d+\][.\w\[\]]*", "messages"),
        (r"^stop\b", "stop_sequences"),
        (r"^response_format(\.json_schema)?\b", "output_config.format"),
        (r"^(tools\[\d+\])\.function\.parameters\b", r"\1.input_schema"),
        (r"^(tools\[\d+\])\.function\b", r"\1"),
        (r"^parallel_tool_calls\b", "tool_choice.disable_parallel_tool_use"),
        (r"^tool_choice 'required'", "tool_choice 'any'"),
    )
]
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}


def messages_request(raw: dict[str, Any]) -> ChatRequest:
    """The request of ``/v1/messages``, or an ApiError that names the wrong field."""
    _has_max_tokens(raw)
    return count_request(raw)


def count_request(raw: dict[str, Any]) -> ChatRequest:
    """The request of ``/v1/messages/count_tokens``."""
    chat, dialect = _chat(raw, None)
    try:
        request = chat_request(chat)
    except ApiError as error:
        error.rename(dialect.names)
        raise
    request.raw = raw
    request.dialect = dialect
    return request


def messages_elsewhere(raw: dict[str, Any], model: str) -> tuple[dict[str, Any], MessagesDialect]:
    """A request to somebody else's model (LiteLLM's name) as a chat request's fields, and how the
    answer is said. What the model can read is its provider's to judge."""
    _has_max_tokens(raw)
    return count_elsewhere(raw, model)


def count_elsewhere(raw: dict[str, Any], model: str) -> tuple[dict[str, Any], MessagesDialect]:
    return _chat(raw, model)


def anthropic_error(error: ApiError) -> dict[str, Any]:
    kind = "api_error" if error.status >= 500 else "invalid_request_error"
    kind = _ERROR_TYPES.get(error.status, kind)
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def _has_max_tokens(raw: dict[str, Any]) -> None:
    if raw.get("max_tokens") is None:
        raise invalid("max_tokens", "max_tokens is required: an integer of at least 1")


def _chat(raw: dict[str, Any], elsewhere: str | None) -> tuple[dict[str, Any], MessagesDialect]:
    _check(raw, ours=elsewhere is None)
    told = {**raw, "messages": [_with_errors_told(message) for message in raw["messages"]]}
    if elsewhere is None:
        # An answer without a word: LiteLLM would drop the turn, and it would not be gone on from.
        told["messages"] = [
            {**message, "content": ""} if message["content"] == [] else message
            for message in told["messages"]
        ]
    chat, names = translation.chat_of_messages(told, elsewhere)
    choice = raw.get("tool_choice") or {}
    if choice.get("disable_parallel_tool_use"):
        chat["parallel_tool_calls"] = False  # LiteLLM drops it
    for tool in chat.get("tools") or []:
        # LiteLLM writes the description last. Templates write what they get, and the model
        # should read one tool in one way.
        function = tool["function"]
        tool["function"] = {name: function[name] for name in _FUNCTION if name in function}
    format = (raw.get("output_config") or {}).get("format") or raw.get("output_format")
    if format is not None:
        chat["response_format"] = _response_format(format)  # LiteLLM's requires every property
    effort = (raw.get("output_config") or {}).get("effort")
    if elsewhere is not None and effort is not None:
        _put_effort(chat, effort, elsewhere)
    chat["stream"] = raw.get("stream")
    return chat, MessagesDialect(names)


def _with_errors_told(message: dict[str, Any]) -> dict[str, Any]:
    """``is_error`` of tool results as text, ``Error: `` before what the tool said: chat has no
    field for it, so LiteLLM drops it, and no template would write one."""
    content = message["content"]
    if isinstance(content, str) or not any(map(_is_error, content)):
        return message
    return {**message, "content": [_with_error_told(block) for block in content]}


def _is_error(block: dict[str, Any]) -> bool:
    return block["type"] == "tool_result" and bool(block.get("is_error"))


def _with_error_told(block: dict[str, Any]) -> dict[str, Any]:
    if not _is_error(block):
        return block
    said = block.get("content") or ""
    parts = [{"type": "text", "text": said}] if isinstance(said, str) else list(said)
    if parts and parts[0]["type"] == "text":
        parts[0] = {**parts[0], "text": f"Error: {parts[0]['text']}"}
    else:
        parts.insert(0, {"type": "text", "text": "Error: "})
    return {**block, "content": parts}


def _put_effort(chat: dict[str, Any], effort: Any, elsewhere: str) -> None:
    """Hands on what LiteLLM does only with adaptive thinking. Which efforts there are, and whether
    the model knows any, is the provider's to judge."""
    if not isinstance(effort, str):
        raise invalid("output_config.effort", "output_config.effort must be a string")
    if elsewhere.startswith("anthropic/"):
        # In the field's own name: reasoning_effort would become a budget for thinking.
        if "reasoning_effort" not in chat:
            chat["output_config"] = {"effort": effort}
    elif "output_config" not in chat and chat.get("reasoning_effort") != "none":
        chat["reasoning_effort"] = effort  # "none": the client wants no thinking at all


def _response_format(format: Any) -> dict[str, Any]:
    kind = format.get("type") if isinstance(format, dict) else None
    if kind != "json_schema" or not isinstance(format.get("schema"), dict):
        raise invalid("output_config.format", 'output_config.format must be an object like '
                      '{"type": "json_schema", "schema": {}}')  # fmt: skip
    schema = {"name": "output", "schema": format["schema"], "strict": True}
    return {"type": "json_schema", "json_schema": schema}


def _check(raw: dict[str, Any], *, ours: bool) -> None:
    """Refuses what LiteLLM would drop in silence or stumble over.

    Args:
        ours: whether our model answers. It reads text only, and its turn begins empty.
    """
    model, messages = raw.get("model"), raw.get("messages")
    if not isinstance(model, str) or not model:
        raise invalid("model", "model must be a non-empty string")
    if not isinstance(messages, list) or not messages:
        raise invalid("messages", "messages must be a non-empty list")
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if not isinstance(message, dict):
            raise invalid(where, f"{where} must be an object")
        if message.get("role") not in ("user", "assistant", "system"):
            raise invalid(f"{where}.role", f"{where}.role must be user or assistant")
        content = message.get("content")
        _check_content(content, f"{where}.content", ours)
        if not content and message["role"] != "assistant":  # LiteLLM drops the message
            raise invalid(f"{where}.content", f"{where}.content must not be empty")
    if ours and messages[-1]["role"] == "assistant":
        raise invalid("messages", "the last message must be the user's; prefilling the "
                      "assistant's reply is not supported")  # fmt: skip
    for name, instead in _UNSUPPORTED.items():
        if raw.get(name):
            raise invalid(name, f"{name} is not supported; {instead}", code="unsupported_parameter")
    if raw.get("system") is not None:
        _check_content(raw["system"], "system", ours)
    if not isinstance(raw.get("output_config"), dict | None):
        raise invalid("output_config", "output_config must be an object")
    for name in ("tools", "stop_sequences"):
        if raw.get(name) is not None and not isinstance(raw[name], list):
            raise invalid(name, f"{name} must be a list")
    for i, tool in enumerate(raw.get("tools") or []):
        if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
            raise invalid(f"tools[{i}]", f"tools[{i}] must be an object with a name")
        if tool.get("type") not in (None, "custom"):
            raise invalid(f"tools[{i}].type", f"tools[{i}] is a server tool ({tool['type']}); "
                          "this model has client tools only", code="unsupported_tool")  # fmt: skip
        if not isinstance(tool.get("input_schema"), dict):
            raise invalid(f"tools[{i}].input_schema", f"tools[{i}].input_schema must be an object")
    choice = raw.get("tool_choice")
    if choice is not None and (
        not isinstance(choice, dict) or choice.get("type") not in ("auto", "any", "tool", "none")
    ):
        raise invalid("tool_choice", "tool_choice.type must be auto, any, tool or none")


def _check_content(content: Any, where: str, ours: bool) -> None:
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        raise invalid(where, f"{where} must be a string or a list of content blocks")
    for i, block in enumerate(content):
        kind = block.get("type") if isinstance(block, dict) else None
        if kind in ("image", "document"):
            if not ours:
                continue
            raise invalid(f"{where}[{i}]", f"{where}[{i}] is of type {kind}; this model reads "
                          "text only", code="unsupported_content")  # fmt: skip
        if kind not in _BLOCKS:
            raise invalid(f"{where}[{i}].type",
                          f"{where}[{i}].type must be one of {', '.join(_BLOCKS)}")  # fmt: skip
        if kind == "text" and not isinstance(block.get("text"), str):
            raise invalid(f"{where}[{i}].text", f"{where}[{i}].text must be a string")
        if kind == "tool_use" and not isinstance(block.get("name"), str):
            raise invalid(f"{where}[{i}].name", f"{where}[{i}].name must be a string")
        if not isinstance(block.get("is_error"), bool | None):
            raise invalid(f"{where}[{i}].is_error", f"{where}[{i}].is_error must be true or false")
        if kind == "tool_result" and not isinstance(block.get("tool_use_id"), str | None):
            where = f"{where}[{i}].tool_use_id"
            raise invalid(where, f"{where} must be a string")
        if kind == "tool_result" and block.get("content") is not None:
            _check_content(block["content"], f"{where}[{i}].content", ours)


class MessagesDialect:
    """A message whole, or as message_start, content blocks, message_delta and message_stop.

    Args:
        names: full names of tools, by those the model was told.
    """

    id_prefix = "msg_"
    names: Names = _NAMES

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names
        self._begun = False
        self._index = -1  # of the latest block
        self._open: str | None = None  # its type, while it is open

    def chunk(
        self,
        heading: chat_objects.Heading,
        index: int,
        delta: dict[str, Any],
        *,
        logprobs: list[dict[str, Any]] | None = None,
        finish_reason: str | None = None,
    ) -> bytes:
        out = b""
        if not self._begun:
            self._begun = True
            out = self._start(heading)
        for block in _thinking(delta):
            begun = {"type": "thinking", "thinking": "", "signature": ""}
            if block["type"] == "redacted_thinking":
                out += self._close() + self._grow(block, None) + self._close()
            for name, kind in (("thinking", "thinking_delta"), ("signature", "signature_delta")):
                if block.get(name) and block["type"] == "thinking":
                    out += self._grow(begun, {"type": kind, name: block[name]})
                    if name == "signature":  # it ends a block: what thinking follows is another
                        out += self._close()
        if delta.get("content"):
            out += self._grow(
                {"type": "text", "text": ""}, {"type": "text_delta", "text": delta["content"]}
            )
        for call in delta.get("tool_calls") or ():
            block: dict[str, Any] = {"type": "tool_use"}
            if "id" in call:  # the first piece of a call
                out += self._close()
                block = {**self._tool_use(call), "input": {}}
            arguments = call["function"].get("arguments", "")
            out += self._grow(block, {"type": "input_json_delta", "partial_json": arguments})
        return out

    def end(self, response: dict[str, Any]) -> bytes:
        [choice] = response["choices"]
        usage = _usage(response["usage"])
        return (
            self._close()
            + _event("message_delta", delta=_stop(choice), usage=usage)
            + _event("message_stop")
        )

    def whole(self, response: dict[str, Any]) -> dict[str, Any]:
        [choice] = response["choices"]
        message = choice["message"]
        content: list[dict[str, Any]] = []
        for block in _thinking(message):
            if block["type"] == "thinking":
                block = {"type": "thinking", "thinking": "", "signature": "", **block}
            content.append(block)
        if message["content"]:
            content.append({"type": "text", "text": message["content"]})
        for call in message.get("tool_calls") or ():
            content.append({**self._tool_use(call), "input": _input(call)})
        return {
            "id": response["id"],
            "type": "message",
            "role": "assistant",
            "model": response["model"],
            "content": content,
            **_stop(choice),
            "usage": _usage(response["usage"]),
        }

    def read(self, said: dict[str, Any]) -> dict[str, Any]:
        told = {full: name for name, full in self._names.items()}
        message: dict[str, Any] = {"role": "assistant", "content": ""}
        calls: list[dict[str, Any]] = []
        for block in said["content"]:
            if block["type"] == "thinking":
                message["reasoning_content"] = block["thinking"]
            elif block["type"] == "text":
                message["content"] = block["text"]
            else:
                name, arguments = told.get(block["name"], block["name"]), block["input"]
                if not isinstance(arguments, str):
                    arguments = json.dumps(arguments, ensure_ascii=False)
                function = {"name": name, "arguments": arguments}
                calls.append({"id": block["id"], "type": "function", "function": function})
        if calls:
            message |= {"content": message["content"] or None, "tool_calls": calls}
        choice = chat_objects.choice(0, message, _FINISH_REASONS[said["stop_reason"]], None)
        if said["stop_sequence"] is not None:
            choice["stop_reason"] = said["stop_sequence"]
        usage = chat_objects.usage(said["usage"]["input_tokens"], said["usage"]["output_tokens"])
        return chat_objects.completion(
            chat_objects.Heading(said["id"], said["model"]), [choice], usage
        )

    def failed(self, error: ApiError) -> bytes:
        return _event("error", error=anthropic_error(error)["error"])

    def _start(self, heading: chat_objects.Heading) -> bytes:
        usage = _usage({"prompt_tokens": heading.prompt_tokens, "completion_tokens": 0})
        message = {
            "id": heading.id,
            "type": "message",
            "role": "assistant",
            "model": heading.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }
        return _event("message_start", message=message)

    def _grow(self, block: dict[str, Any], delta: dict[str, Any] | None) -> bytes:
        """Adds to the open block, if it is of this type, or to a new one."""
        out = b""
        if self._open != block["type"]:
            out = self._close()
            self._open = block["type"]
            self._index += 1
            out += _event("content_block_start", index=self._index, content_block=block)
        if delta is None:  # a block that comes whole
            return out
        return out + _event("content_block_delta", index=self._index, delta=delta)

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        self._open = None
        return _event("content_block_stop", index=self._index)

    def _tool_use(self, call: dict[str, Any]) -> dict[str, Any]:
        name = call["function"]["name"]
        return {"type": "tool_use", "id": call["id"], "name": self._names.get(name, name)}


def _thinking(said: dict[str, Any]) -> list[dict[str, Any]]:
    """The thinking in a message or delta as blocks: a provider's own, whose signatures it wants
    back (LiteLLM hands them on beside the text), or plain reasoning."""
    if said.get("thinking_blocks"):
        return [block for block in said["thinking_blocks"] if block.get("type")]
    if said.get("reasoning_content"):
        return [{"type": "thinking", "thinking": said["reasoning_content"]}]
    return []


def _input(call: dict[str, Any]) -> Any:
    """A call's arguments. Those of a call that broke off in a stream, whose client has them so
    already, stay text: only the record sees them here."""
    arguments = call["function"]["arguments"]
    try:
        return orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return arguments


def _event(kind: str, **data: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps({"type": kind, **data}))


def _stop(choice: dict[str, Any]) -> dict[str, Any]:
    stopped_by = choice.get("stop_reason")
    if stopped_by is not None and choice["finish_reason"] == "stop":
        return {"stop_reason": "stop_sequence", "stop_sequence": stopped_by}
    # A provider's reason may be one that Anthropic's API has no word for.
    reason = _STOP_REASONS.get(choice["finish_reason"], "end_turn")
    return {"stop_reason": reason, "stop_sequence": None}


def _usage(usage: Mapping[str, Any]) -> dict[str, int]:
    """Zeros where a provider did not tell: the protocol demands numbers. (The call's record says
    that they are none.)"""
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    written = usage.get("cache_creation_input_tokens") or 0
    return {
        # Anthropic counts what came from or went into a cache apart, OpenAI and LiteLLM within.
        "input_tokens": max(usage.get("prompt_tokens", 0) - cached - written, 0),
        "output_tokens": usage.get("completion_tokens", 0),
        "cache_creation_input_tokens": written,
        "cache_read_input_tokens": cached,
    }
