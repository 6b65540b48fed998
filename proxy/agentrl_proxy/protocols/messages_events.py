"""Write answers and errors of Anthropic's Messages API, whole or as events.

Knows the API's blocks and events. Does not know its requests, or tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import orjson

from agentrl_proxy.errors import ApiError, Names
from agentrl_proxy.protocols import chat_objects

_STOP_REASONS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "content_filter": "refusal",
}
_FINISH_REASONS = {said: reason for reason, said in _STOP_REASONS.items()} | {
    "stop_sequence": "stop"
}
# One Anthropic message may become several chat messages, so its index is lost.
_NAMES: Names = [
    (re.compile(pattern), own)
    for pattern, own in (
        (r"^messages\[\d+\][.\w\[\]]*", "messages"),
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


def anthropic_error(error: ApiError) -> dict[str, Any]:
    kind = "api_error" if error.status >= 500 else "invalid_request_error"
    kind = _ERROR_TYPES.get(error.status, kind)
    return {"type": "error", "error": {"type": kind, "message": error.message}}


class MessagesDialect:
    """Writes a message whole, or as message_start, content blocks, message_delta and message_stop.

    Args:
        names: full names of tools, by the shortened ones that the model saw.
    """

    id_prefix = "msg_"
    names: Names = _NAMES

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names
        self._begun = False
        self._index = -1  # of the latest block
        self._open: str | None = None  # the type of the open block

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
                    if name == "signature":  # it ends the block
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
        calls: list[tuple[str, str, str]] = []
        for block in said["content"]:
            if block["type"] == "thinking":
                message["reasoning_content"] = block["thinking"]
            elif block["type"] == "text":
                message["content"] = block["text"]
            else:
                arguments = block["input"]
                if not isinstance(arguments, str):
                    arguments = json.dumps(arguments, ensure_ascii=False)
                name = str(block["name"])
                calls.append((block["id"], told.get(name, name), arguments))
        message = chat_objects.with_tool_calls(message, calls)
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
        """Extend the open block if it has this type, else a new one."""
        out = b""
        if self._open != block["type"]:
            out = self._close()
            self._open = block["type"]
            self._index += 1
            out += _event("content_block_start", index=self._index, content_block=block)
        if delta is None:  # the block came whole
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
    """Return the thinking of a message or delta as blocks: a provider's own, whose signatures it
    wants back, or plain reasoning."""
    if said.get("thinking_blocks"):
        return [block for block in said["thinking_blocks"] if block.get("type")]
    if said.get("reasoning_content"):
        return [{"type": "thinking", "thinking": said["reasoning_content"]}]
    return []


def _input(call: dict[str, Any]) -> Any:
    """Return a call's arguments. Those of a call that broke off in a stream stay text; only the
    record has them here."""
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
    # Anthropic's API has no word for some reasons.
    reason = _STOP_REASONS.get(choice["finish_reason"], "end_turn")
    return {"stop_reason": reason, "stop_sequence": None}


def _usage(usage: Mapping[str, Any]) -> dict[str, int]:
    """Return zeros for what a provider did not report: the protocol demands numbers. The call's
    record has none."""
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    written = usage.get("cache_creation_input_tokens") or 0
    return {
        # Anthropic counts cached tokens apart; OpenAI and LiteLLM include them.
        "input_tokens": max(usage.get("prompt_tokens", 0) - cached - written, 0),
        "output_tokens": usage.get("completion_tokens", 0),
        "cache_creation_input_tokens": written,
        "cache_read_input_tokens": cached,
    }
