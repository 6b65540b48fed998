"""Read requests of OpenAI's Responses API.

Knows the API's fields and items; responses_events.py writes the answers. LiteLLM translates the
request to chat completions (translation.py). Nothing is stored between requests: a client sends
the whole conversation each time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from agentrl_proxy.errors import invalid
from agentrl_proxy.protocols import translation
from agentrl_proxy.protocols.chat import (
    FUNCTION,
    MAX_TOKENS,
    MAX_TOP_LOGPROBS,
    SAMPLING,
    SCHEMA_FORMAT,
    ChatRequest,
    tool_choice,
    translated_request,
)
from agentrl_proxy.protocols.fields import (
    BOOLEAN,
    LIST,
    NAME,
    NONEMPTY,
    OBJECT,
    TEXT,
    Array,
    Either,
    Object,
    Tagged,
    check_body,
    integer,
    one_of,
    text_or,
)
from agentrl_proxy.protocols.responses_events import ResponsesDialect

# Refused unless null or false: without them the answer would be a different one.
_UNSUPPORTED = {
    "previous_response_id": "send the whole conversation as `input`; nothing is stored here",
    "conversation": "send the whole conversation as `input`; nothing is stored here",
    "prompt": "stored prompts are OpenAI's; send `instructions` and `input`",
    "background": "send it with background: false",
}
_WITH_LOGPROBS = "message.output_text.logprobs"
_PART = Tagged(
    "type",
    dict.fromkeys(("input_text", "output_text", "text"), Object(["text"], text=TEXT))
    | {"refusal": Object(["refusal"], refusal=TEXT)},
    default="input_text",
    provider_kinds=dict.fromkeys(("input_image", "input_file", "input_audio"), Object([])),
    refusal=("unsupported_content", "this model reads text only"),
)
_ITEM = Tagged(
    "type",
    {
        "message": Object(
            ["role", "content"],
            role=one_of("user", "assistant", "system", "developer"),
            content=text_or(_PART),
        ),
        "function_call": Object(
            ["call_id", "name", "arguments"], call_id=TEXT, name=TEXT, arguments=TEXT
        ),
        "function_call_output": Object(["call_id", "output"], call_id=TEXT, output=text_or(_PART)),
        "reasoning": Object(
            [], summary=Array(Tagged("type", {"summary_text": Object(["text"], text=TEXT)}))
        ),
    },
    default="message",
)
_TOOL = Tagged(
    "type",
    {"function": FUNCTION},
    refusal=("unsupported_tool", "this model has no built-in tools"),
)
_FORMAT = Tagged(
    "type",
    dict.fromkeys(("text", "json_object"), Object([])) | {"json_schema": SCHEMA_FORMAT},
)
RESPONSES = Object(
    ["model", "input"],
    model=NAME,
    input=Either("a non-empty string or list of items", str=NONEMPTY, list=Array(_ITEM, minimum=1)),
    instructions=TEXT,
    max_output_tokens=MAX_TOKENS,
    max_tool_calls=replace(integer(0), for_provider=None),
    store=BOOLEAN,
    truncation=one_of("auto", "disabled"),
    tools=Array(_TOOL),
    tool_choice=tool_choice(
        {"function": Object(["name"], name=TEXT)}, '{"type": "function", "name": "..."}'
    ),
    text=Object([], format=_FORMAT),
    include=replace(LIST, schema={"type": "array", "items": {"enum": [_WITH_LOGPROBS]}}),
    reasoning=replace(
        OBJECT, schema=Object([], effort=one_of("minimal", "low", "medium", "high")).schema
    ),
    metadata=replace(OBJECT, schema={"type": "object", "additionalProperties": TEXT.schema}),
    **SAMPLING,
    top_logprobs=integer(0, MAX_TOP_LOGPROBS),
    stream=BOOLEAN,
    parallel_tool_calls=BOOLEAN,
)


def responses_request(raw: dict[str, Any]) -> ChatRequest:
    """Check a request of ``/v1/responses`` to our own model.

    Raises:
        ApiError: a field is wrong (400); it names the field.
    """
    chat, dialect = responses_as_chat(raw)
    return translated_request(chat, raw, dialect)


def responses_as_chat(
    raw: dict[str, Any], provider_model: str | None = None
) -> tuple[dict[str, Any], ResponsesDialect]:
    """Translate a request to the fields of chat completions, and make its answer's dialect.

    Args:
        provider_model: LiteLLM's name of the model that answers; None for our own.

    Raises:
        ApiError: a field is wrong (400).
    """
    _check(raw, ours=provider_model is None)
    chat = translation.chat_of_response(raw, provider_model)
    wanted = _WITH_LOGPROBS in (raw.get("include") or ())
    chat |= {
        "stream": raw.get("stream"),
        "logprobs": wanted,  # LiteLLM knows neither
        "top_logprobs": raw.get("top_logprobs") if wanted else None,
    }
    for tool, sent in zip(chat.get("tools") or [], raw.get("tools") or [], strict=True):
        if sent.get("strict") is None:  # LiteLLM says false, and the template would write it
            tool["function"].pop("strict", None)
    for name in ("stop", "seed", "top_k"):  # useful, though not of this API
        if raw.get(name) is not None:
            chat[name] = raw[name]
    return chat, ResponsesDialect(raw)


def _check(raw: dict[str, Any], *, ours: bool) -> None:
    """Refuse fields that LiteLLM would drop silently or fail on."""
    check_body(RESPONSES, raw, ours=ours)
    for name, instead in _UNSUPPORTED.items():
        if raw.get(name):
            raise invalid(name, f"{name} is not supported; {instead}", code="unsupported_parameter")
    called = set[str]()
    for i, item in enumerate(raw["input"] if isinstance(raw["input"], list) else ()):
        if item.get("type") == "function_call":
            called.add(item["call_id"])
        elif item.get("type") == "function_call_output" and item["call_id"] not in called:
            where = f"input[{i}].call_id"
            raise invalid(where, f"{where}: no function_call before it has this call_id")
