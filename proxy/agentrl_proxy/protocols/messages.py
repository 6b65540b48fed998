"""Read requests of Anthropic's Messages API, and write its answers, events and errors.

conversion.py makes a request one of chat completions. Does not know tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import orjson

from agentrl_proxy.errors import ApiError, Names, invalid
from agentrl_proxy.protocols import conversion
from agentrl_proxy.protocols.chat import (
    MAX_MESSAGES,
    MAX_STOPS,
    MAX_TOKENS,
    MAX_TOOLS,
    SAMPLING,
    TEMPLATE,
    THINKING,
)
from agentrl_proxy.protocols.chat_objects import BlockEvents, Heading, event, heading_of
from agentrl_proxy.protocols.fields import (
    BOOLEAN,
    JSON_SCHEMA,
    NAME,
    NONEMPTY,
    OBJECT,
    TEXT,
    Array,
    Object,
    Tagged,
    check_body,
    text_or,
)
from agentrl_proxy.protocols.vendor_fields import refuse_unsupported, without_tools

# --- requests

_UNSUPPORTED = {
    "mcp_servers": "let the agent call them, and send their tools as `tools`",
    "container": "nothing is run here",
    "stop": "send `stop_sequences`",
    **dict.fromkeys(
        ("response_format", "guided_json", "structured_outputs"), "send `output_config.format`"
    ),
}
_NO_MEDIA = ("unsupported_content", "this model reads text only")
_MEDIA: dict[str, Object] = {"image": Object([]), "document": Object([])}
_TEXT_BLOCK = Tagged(
    {"text": Object(["text"], text=TEXT)}, provider_kinds=_MEDIA, refusal=_NO_MEDIA
)
_BLOCK = Tagged(
    {
        "text": Object(["text"], text=TEXT),
        "tool_use": Object(["id", "name", "input"], id=NONEMPTY, name=NONEMPTY, input=OBJECT),
        "tool_result": Object(
            ["tool_use_id"], tool_use_id=TEXT, content=text_or(_TEXT_BLOCK), is_error=BOOLEAN
        ),
        "thinking": Object(["thinking"], thinking=TEXT, signature=TEXT),
        "redacted_thinking": Object(["data"], data=TEXT),
    },
    provider_kinds=_MEDIA,
    refusal=_NO_MEDIA,
)
_ASKING = Object(["content"], content=text_or(_BLOCK, minimum=1))  # LiteLLM drops empty ones
_MESSAGE = Tagged(
    dict.fromkeys(("user", "system"), _ASKING)
    | {"assistant": Object(["content"], content=text_or(_BLOCK))},
    tag="role",
)
_CUSTOM = {"name": NONEMPTY, "description": TEXT, "input_schema": JSON_SCHEMA, "strict": BOOLEAN}
_TOOL = Tagged(
    {"custom": Object(["name", "input_schema"], **_CUSTOM)},
    default="custom",
    refusal=(
        "unsupported_tool",
        "a server tool; this model has client tools only; gateway.leave_out_tools leaves them out",
    ),
)
_FORMAT = Tagged({"json_schema": Object(["schema"], schema=JSON_SCHEMA)})
COUNT = Object(
    ["model", "messages"],
    model=NAME,
    messages=Array(
        _MESSAGE, minimum=1, maximum=MAX_MESSAGES, description="the last message is the user's"
    ),
    system=text_or(_TEXT_BLOCK),
    tools=Array(_TOOL, maximum=MAX_TOOLS),
    tool_choice=Tagged(
        dict.fromkeys(("auto", "any", "none"), Object([], disable_parallel_tool_use=BOOLEAN))
        | {"tool": Object(["name"], name=TEXT, disable_parallel_tool_use=BOOLEAN)}
    ),
    thinking=THINKING,
    **{name: TEMPLATE[name] for name in ("chat_template_kwargs", "enable_thinking")},
    output_config=Object([], format=_FORMAT, effort=TEXT),
    output_format=_FORMAT,  # its older name
)
MESSAGES = Object(
    [*COUNT.required, "max_tokens"],
    **COUNT.properties,
    max_tokens=MAX_TOKENS,
    stop_sequences=Array(NONEMPTY, maximum=MAX_STOPS),
    **{name: SAMPLING[name] for name in ("temperature", "top_p", "top_k")},
    stream=BOOLEAN,
)


def messages_as_chat(
    raw: dict[str, Any],
    provider_model: str | None = None,
    *,
    counted: bool = False,
    leave_out: bool = False,
) -> tuple[dict[str, Any], MessagesDialect]:
    """Translate a request of ``/v1/messages`` or its ``count_tokens`` to the fields of chat
    completions, and make its answer's dialect.

    Args:
        provider_model: LiteLLM's name of the model that answers; None for our own.
        counted: whether only the tokens of the prompt are counted.
        leave_out: leave tools out that only Anthropic runs; else they are refused.

    Raises:
        ApiError: a field is wrong (400).
    """
    ours = provider_model is None
    left_out: list[str] = []
    if leave_out:
        raw, left_out = without_tools(raw, ("custom",))
    # LiteLLM would drop wrong and unsupported fields silently, or fail on them.
    check_body(COUNT if counted else MESSAGES, raw, ours=ours)
    if ours and raw["messages"][-1]["role"] == "assistant":
        raise invalid("messages", "the last message must be the user's; prefilling the "
                      "assistant's reply is not supported")  # fmt: skip
    refuse_unsupported(raw, _UNSUPPORTED, ours=ours)
    readable = {**raw, "messages": [_with_error_texts(message) for message in raw["messages"]]}
    config = raw.get("output_config") or {}
    if provider_model is None:
        chat, names = conversion.chat_of_messages(readable), dict[str, str]()
        chat |= {name: raw.get(name) for name in ("thinking", *TEMPLATE)}
        chat |= {"reasoning_effort": config.get("effort"), "left_out": left_out}
    else:
        chat, names = conversion.provider_chat_of_messages(readable, provider_model)
    if (raw.get("tool_choice") or {}).get("disable_parallel_tool_use"):
        chat["parallel_tool_calls"] = False  # LiteLLM drops it
    format = config.get("format") or raw.get("output_format")
    if format is not None:  # LiteLLM's format requires every property
        schema = {"name": "output", "schema": format["schema"], "strict": True}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    if provider_model is not None and (effort := config.get("effort")) is not None:
        # LiteLLM passes it on only with adaptive thinking. The provider decides which there are.
        if not provider_model.startswith("anthropic/"):
            if "output_config" not in chat and chat.get("reasoning_effort") != "none":
                chat["reasoning_effort"] = effort  # "none": the client wants no thinking
        elif "reasoning_effort" not in chat:  # LiteLLM would make it a budget for thinking
            chat["output_config"] = {"effort": effort}
    chat["stream"] = raw.get("stream")
    return chat, MessagesDialect(names)


def _with_error_texts(message: dict[str, Any]) -> dict[str, Any]:
    content = message["content"]
    if isinstance(content, str):
        return message
    return {**message, "content": [_with_error_text(block) for block in content]}


def _with_error_text(block: dict[str, Any]) -> dict[str, Any]:
    """Write ``Error: `` before a failed tool result; chat completions have no ``is_error``."""
    if block["type"] != "tool_result" or not block.get("is_error"):
        return block
    said = block.get("content") or ""
    parts = [{"type": "text", "text": said}] if isinstance(said, str) else list(said)
    if not parts or parts[0]["type"] != "text":
        parts.insert(0, {"type": "text", "text": ""})
    parts[0] = {**parts[0], "text": f"Error: {parts[0]['text']}"}
    return {**block, "content": parts}


# --- answers

_EMPTY: dict[str, dict[str, Any]] = {  # how blocks begin
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
    "text": {"type": "text", "text": ""},
}
# Anthropic's API has no word for other reasons.
_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
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


class MessagesDialect(BlockEvents):
    """Writes a message whole, or as message_start, content blocks, message_delta and message_stop.

    Args:
        names: full names of tools, by the shortened ones that the model saw.
    """

    id_prefix = "msg_"
    # One Anthropic message may become several chat messages, so its index is lost.
    names: Names = (
        (r"^messages\[\d+\][.\w\[\]]*", "messages"),
        (r"^response_format(\.json_schema)?\b", "output_config.format"),
        (r"^(tools\[\d+\])\.function\.parameters\b", r"\1.input_schema"),
        (r"^(tools\[\d+\])\.function\b", r"\1"),
        (r"^parallel_tool_calls\b", "tool_choice.disable_parallel_tool_use"),
        (r"^tool_choice 'required'", "tool_choice 'any'"),
        (r"^reasoning_effort\b", "output_config.effort"),
    )
    text_kind = "text"
    call_kind = "tool_use"

    def __init__(self, names: Mapping[str, str]) -> None:
        super().__init__()
        self._names = names

    def end(self, response: dict[str, Any]) -> bytes:
        [choice] = response["choices"]
        usage = _usage(response["usage"])
        stop = event("message_delta", delta=_stop(choice), usage=usage)
        return self._close() + stop + event("message_stop")

    def whole(self, response: dict[str, Any]) -> dict[str, Any]:
        [choice] = response["choices"]
        message = choice["message"]
        content = [
            {**_EMPTY["thinking"], **block} if block["type"] == "thinking" else block
            for block in _thoughts(message)
        ]
        if message["content"]:
            content.append({"type": "text", "text": message["content"]})
        for call in message.get("tool_calls") or ():
            arguments = call["function"]["arguments"]
            with contextlib.suppress(orjson.JSONDecodeError):  # a call that broke off stays text
                arguments = orjson.loads(arguments)
            content.append({**self._tool_use(call), "input": arguments})
        return _message(heading_of(response), content, response["usage"]) | _stop(choice)

    def failed(self, error: ApiError) -> bytes:
        return event("error", error=anthropic_error(error)["error"])

    def _start(self, heading: Heading) -> bytes:
        usage = {"prompt_tokens": heading.prompt_tokens}
        return event("message_start", message=_message(heading, [], usage))

    def _think(self, delta: dict[str, Any]) -> bytes:
        out = b""
        for block in _thoughts(delta):
            if block["type"] == "redacted_thinking":  # it comes whole
                out += self._open("redacted_thinking", block) + self._close()
            for name in ("thinking", "signature"):
                if said := block.get(name):
                    out += self._switch("thinking") + self._delta(f"{name}_delta", name, said)
            if block.get("signature"):  # it ends the block
                out += self._close()
        return out

    def _opened(self, said: dict[str, Any]) -> bytes:
        block = _EMPTY.get(self._kind, said)
        if self._kind == "tool_use":
            block = {**self._tool_use(said), "input": {}}
        return event("content_block_start", index=self._index, content_block=block)

    def _extend(self, text: str, choice: dict[str, Any]) -> bytes:
        if self._kind == "tool_use":
            return self._delta("input_json_delta", "partial_json", text)
        return self._delta("text_delta", "text", text)

    def _delta(self, kind: str, name: str, text: str) -> bytes:
        return event("content_block_delta", index=self._index, delta={"type": kind, name: text})

    def _closed(self) -> bytes:
        return event("content_block_stop", index=self._index)

    def _tool_use(self, call: dict[str, Any]) -> dict[str, Any]:
        name = call["function"]["name"]
        return {"type": "tool_use", "id": call["id"], "name": self._names.get(name, name)}


def _message(
    heading: Heading, content: list[dict[str, Any]], usage: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "id": heading.id,
        "type": "message",
        "role": "assistant",
        "model": heading.model,
        "content": content,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(usage),
    }


def _thoughts(said: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the thinking of a message or delta as blocks: a provider's own, whose signatures it
    wants back, or plain reasoning."""
    if said.get("thinking_blocks"):
        return [block for block in said["thinking_blocks"] if block.get("type")]
    if said.get("reasoning_content"):
        return [{"type": "thinking", "thinking": said["reasoning_content"]}]
    return []


def _stop(choice: dict[str, Any]) -> dict[str, Any]:
    stopped_by = choice.get("stop_reason")
    if stopped_by is not None and choice["finish_reason"] == "stop":
        return {"stop_reason": "stop_sequence", "stop_sequence": stopped_by}
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
