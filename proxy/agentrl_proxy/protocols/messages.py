"""Read requests of Anthropic's Messages API.

Knows the API's fields and blocks; messages_events.py writes the answers. LiteLLM translates the
request to chat completions (translation.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from agentrl_proxy.errors import invalid
from agentrl_proxy.protocols import translation
from agentrl_proxy.protocols.chat import (
    MAX_STOPS,
    MAX_TOKENS,
    SAMPLING,
    ChatRequest,
    translated_request,
)
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
from agentrl_proxy.protocols.messages_events import MessagesDialect

# Refused unless empty: without them the answer would be a different one.
_UNSUPPORTED = {
    "mcp_servers": "let the agent call them, and send their tools as `tools`",
    "container": "nothing is run here",
}
_FUNCTION = ("name", "description", "parameters", "strict")  # OpenAI's order

_NO_MEDIA = ("unsupported_content", "this model reads text only")
_MEDIA: dict[str, Object] = {"image": Object([]), "document": Object([])}
_TEXT_BLOCK = Tagged(
    "type", {"text": Object(["text"], text=TEXT)}, provider_kinds=_MEDIA, refusal=_NO_MEDIA
)
_BLOCK = Tagged(
    "type",
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
    "role",
    {
        "user": _ASKING,
        "system": _ASKING,
        "assistant": Object(["content"], content=text_or(_BLOCK)),
    },
)
_TOOL = Tagged(
    "type",
    {
        "custom": Object(
            ["name", "input_schema"],
            name=NONEMPTY,
            description=TEXT,
            input_schema=JSON_SCHEMA,
            strict=BOOLEAN,
        )
    },
    default="custom",
    refusal=("unsupported_tool", "a server tool; this model has client tools only"),
)
_FORMAT = Tagged("type", {"json_schema": Object(["schema"], schema=JSON_SCHEMA)})
_MAY_CALL = Object([], disable_parallel_tool_use=BOOLEAN)
_THINKING = Tagged(
    "type", {"enabled": Object([], budget_tokens=MAX_TOKENS), "disabled": Object([])}
)
COUNT = Object(
    ["model", "messages"],
    model=NAME,
    messages=Array(_MESSAGE, minimum=1, description="the last message is the user's"),
    system=text_or(_TEXT_BLOCK),
    tools=Array(_TOOL),
    tool_choice=Tagged(
        "type",
        {
            "auto": _MAY_CALL,
            "any": _MAY_CALL,
            "none": _MAY_CALL,
            "tool": Object(["name"], name=TEXT, disable_parallel_tool_use=BOOLEAN),
        },
    ),
    thinking=replace(OBJECT, schema=_THINKING.schema),  # our model ignores it
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


def messages_request(raw: dict[str, Any]) -> ChatRequest:
    """Check a request of ``/v1/messages`` to our own model.

    Raises:
        ApiError: a field is wrong (400); it names the field.
    """
    chat, dialect = messages_as_chat(raw)
    return translated_request(chat, raw, dialect)


def count_request(raw: dict[str, Any]) -> ChatRequest:
    """Check a request of ``/v1/messages/count_tokens`` to our own model."""
    chat, dialect = messages_as_chat(raw, counted=True)
    return translated_request(chat, raw, dialect)


def messages_as_chat(
    raw: dict[str, Any], provider_model: str | None = None, *, counted: bool = False
) -> tuple[dict[str, Any], MessagesDialect]:
    """Translate a request to the fields of chat completions, and make its answer's dialect.

    Args:
        provider_model: LiteLLM's name of the model that answers; None for our own.
        counted: whether only the tokens of the prompt are counted.

    Raises:
        ApiError: a field is wrong (400).
    """
    ours = provider_model is None
    _check(raw, counted=counted, ours=ours)
    messages = [_with_error_text(message) for message in raw["messages"]]
    if ours:
        # LiteLLM drops an assistant's turn without content: its tokens would not be continued.
        messages = [
            {**message, "content": ""} if message["content"] == [] else message
            for message in messages
        ]
    chat, names = translation.chat_of_messages({**raw, "messages": messages}, provider_model)
    if (raw.get("tool_choice") or {}).get("disable_parallel_tool_use"):
        chat["parallel_tool_calls"] = False  # LiteLLM drops it
    for tool in chat.get("tools") or []:
        # Templates write a tool's fields in their order, and LiteLLM puts the description last.
        function = tool["function"]
        tool["function"] = {name: function[name] for name in _FUNCTION if name in function}
    config = raw.get("output_config") or {}
    format = config.get("format") or raw.get("output_format")
    if format is not None:  # LiteLLM's format requires every property
        schema = {"name": "output", "schema": format["schema"], "strict": True}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    if provider_model is not None and config.get("effort") is not None:
        _put_effort(chat, config["effort"], provider_model)
    chat["stream"] = raw.get("stream")
    return chat, MessagesDialect(names)


def _check(raw: dict[str, Any], *, counted: bool, ours: bool) -> None:
    """Refuse fields that LiteLLM would drop silently or fail on."""
    check_body(COUNT if counted else MESSAGES, raw, ours=ours)
    if ours and raw["messages"][-1]["role"] == "assistant":
        raise invalid("messages", "the last message must be the user's; prefilling the "
                      "assistant's reply is not supported")  # fmt: skip
    for name, instead in _UNSUPPORTED.items():
        if raw.get(name):
            raise invalid(name, f"{name} is not supported; {instead}", code="unsupported_parameter")


def _with_error_text(message: dict[str, Any]) -> dict[str, Any]:
    """Write ``Error: `` before each failed tool result; chat completions have no ``is_error``."""
    content = message["content"]
    if isinstance(content, str) or not any(map(_is_error, content)):
        return message
    return {**message, "content": [_marked(one) if _is_error(one) else one for one in content]}


def _is_error(block: dict[str, Any]) -> bool:
    return block["type"] == "tool_result" and bool(block.get("is_error"))


def _marked(block: dict[str, Any]) -> dict[str, Any]:
    said = block.get("content") or ""
    parts = [{"type": "text", "text": said}] if isinstance(said, str) else list(said)
    if parts and parts[0]["type"] == "text":
        parts[0] = {**parts[0], "text": f"Error: {parts[0]['text']}"}
    else:
        parts.insert(0, {"type": "text", "text": "Error: "})
    return {**block, "content": parts}


def _put_effort(chat: dict[str, Any], effort: str, provider_model: str) -> None:
    """Pass on ``output_config.effort``, which LiteLLM does only with adaptive thinking. The
    provider decides which efforts there are."""
    if provider_model.startswith("anthropic/"):
        # Not as reasoning_effort: LiteLLM would make it a budget for thinking.
        if "reasoning_effort" not in chat:
            chat["output_config"] = {"effort": effort}
    elif "output_config" not in chat and chat.get("reasoning_effort") != "none":
        chat["reasoning_effort"] = effort  # "none": the client wants no thinking
