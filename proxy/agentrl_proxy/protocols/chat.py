"""Check the request body of ``/v1/chat/completions``.

Knows OpenAI's field names, their types and ranges. Does not know templates or tokens.

- ``tool_choice: none`` hides the tools from the model, so that nothing needs to be masked.
- ``parallel_tool_calls: false`` is enforced by a grammar where there is one (see
  structured_output.py). With ``tool_choice: auto`` the answer ends where a second call begins, as
  at a stop string: without a mask, with every sampled token recorded
  (``params["cut_at_second_call"]``).
- A function's ``strict`` is enforced wherever a grammar is. With ``tool_choice: auto`` it is not:
  openai-agents and langchain send it with every request, and a masked policy would never learn the
  form that the mask writes for it. The call lists such fields in ``params["not_enforced"]``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from agentrl_proxy.errors import ApiError, invalid
from agentrl_proxy.protocols.chat_objects import ChatDialect, Dialect
from agentrl_proxy.protocols.fields import (
    BOOLEAN,
    INTEGER,
    JSON_SCHEMA,
    LARGEST_COUNT,
    NAME,
    NONEMPTY,
    NUMBER,
    OBJECT,
    STRING_OR_OBJECT,
    TEXT,
    Array,
    Either,
    Field,
    Object,
    Tagged,
    Value,
    check_body,
    integer,
    is_number,
    one_of,
    shown,
    text_or,
)
from agentrl_proxy.protocols.vendor_fields import (
    OURS_ALONE,
    allowed_only,
    asked_thinking,
    guided_format,
    refuse_unsupported,
)
from agentrl_tracer.schemas import GREEDY_BELOW, Call

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
MAX_CHOICES = 128
MAX_STOPS = 16
MAX_TOP_LOGPROBS = 20
MAX_BIASES = 1024
MAX_MESSAGES = 4096
MAX_TOOLS = 1024
MAX_ARGUMENTS = 2**20  # characters of a tool call's arguments, which are parsed at one go
_LONGEST_SWITCH = 100
_MISPLACED = {
    "system": "send a message of the role system",
    "instructions": "send a message of the role system",
}


def _is_bias(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and len(value) <= MAX_BIASES
        and all(key.isascii() and key.isdigit() and len(key) < 10 for key in value)
        and all(is_number(bias) and -100 <= bias <= 100 for bias in value.values())
    )


def _is_switch(value: Any) -> bool:
    short = isinstance(value, str) and len(value) <= _LONGEST_SWITCH
    return short or isinstance(value, bool) or is_number(value)


def _number(accepts: Callable[[float], bool], allowed: str, **limits: float) -> Value:
    schema = {"type": "number", **limits}
    return Value(lambda v: is_number(v) and accepts(v), f"a number {allowed}", schema, NUMBER)


def tool_choice(function: Object, allowed: Object) -> Either:
    """``function``: the object that chooses one tool; ``allowed``: that allows some of them."""
    return Either(
        "none, auto, required or an object that names functions",
        str=replace(one_of("none", "auto", "required"), for_provider=TEXT),
        dict=Tagged({"function": function, "allowed_tools": allowed}, provider_kinds={}),
    )


def allowed_tools(named: Object) -> Object:
    """``named``: an object that names one tool."""
    tools = Array(Tagged({"function": named}), minimum=1)
    return Object(["mode", "tools"], mode=one_of("auto", "required"), tools=tools)


MAX_TOKENS = integer(1)
CHOICES = replace(integer(1, MAX_CHOICES), for_provider=None)
LOGIT_BIAS = Value(
    _is_bias,
    f"an object of up to {MAX_BIASES} token ids, each with a number from -100 to 100",
    {
        "type": "object",
        "propertyNames": {"pattern": "^[0-9]{1,9}$"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        "maxProperties": MAX_BIASES,
    },
    OBJECT,
)
STREAM_OPTIONS = Object([], include_usage=BOOLEAN)
_STOP = replace(NONEMPTY, for_provider=TEXT)
_SWITCHES = Value(
    lambda v: isinstance(v, dict) and all(map(_is_switch, v.values())),
    f"an object of booleans, numbers and strings of up to {_LONGEST_SWITCH} characters",
    {
        "type": "object",
        "additionalProperties": {
            "type": ["boolean", "number", "string"],
            "maxLength": _LONGEST_SWITCH,
        },
    },
)
TEMPLATE: dict[str, Field] = {
    "chat_template_kwargs": _SWITCHES,
    "enable_thinking": BOOLEAN,
    "reasoning_effort": replace(NAME, for_provider=STRING_OR_OBJECT),
}
"""What the chat template is told besides messages and tools."""
THINKING = Tagged(
    dict.fromkeys(("enabled", "disabled", "adaptive", "auto"), Object([])), provider_kinds={}
)
_GUIDED = Either("a JSON schema, as an object or its text", str=NONEMPTY, dict=JSON_SCHEMA)
SAMPLING: dict[str, Field] = {
    "temperature": _number(lambda v: 0 <= v <= 2, "from 0 to 2", minimum=0, maximum=2),
    "top_p": _number(lambda v: 0 < v <= 1, "above 0 and up to 1", exclusiveMinimum=0, maximum=1),
    "top_k": replace(
        integer(-1), allowed=f"an integer up to {LARGEST_COUNT}; 0 and -1 mean all tokens"
    ),
    "stop": Either(
        f"a non-empty string or a list of up to {MAX_STOPS} of them",
        str=_STOP,
        list=Array(_STOP, maximum=MAX_STOPS),
    ),
    "seed": INTEGER,
}
"""Sampling fields that all protocols of OpenAI's share, and the gateway's settings."""

_MEDIA = {
    f"{prefix}{kind}{suffix}": Object([])
    for kind in ("image", "audio", "video", "file", "document")
    for prefix, suffix in (("", ""), ("input_", ""), ("", "_url"))
}
_URL = Either("a string or an object with a url", str=TEXT, dict=Object(["url"], url=TEXT))
_PART = Tagged(
    {"text": Object(["text"], text=TEXT), "refusal": Object(["refusal"], refusal=TEXT)},
    provider_kinds=_MEDIA
    | {name: Object([name], **{name: _URL}) for name in ("image_url", "video_url", "audio_url")}
    | {name: Object([name], **{name: OBJECT}) for name in ("input_audio", "file")},
    refusal=("unsupported_content", "this model reads text only"),
)
_ARGUMENTS = Value(
    lambda v: isinstance(v, str) and len(v) <= MAX_ARGUMENTS,
    f"a string of up to {MAX_ARGUMENTS} characters",
    {"type": "string", "maxLength": MAX_ARGUMENTS},
    TEXT,
)
_CALL = Object(
    ["function"], id=TEXT, type=TEXT, function=Object(["name"], name=TEXT, arguments=_ARGUMENTS)
)

_MESSAGE = Object(
    ["content"],
    content=text_or(_PART),
    name=TEXT,
    tool_call_id=TEXT,
    reasoning_content=TEXT,
    tool_calls=Array(_CALL),
)
MESSAGE = Tagged(
    dict.fromkeys(ROLES, _MESSAGE) | {"assistant": Object([], **_MESSAGE.properties)}, tag="role"
)
FUNCTION = Object(["name"], name=NONEMPTY, description=TEXT, parameters=JSON_SCHEMA, strict=BOOLEAN)
SCHEMA_FORMAT = Object(["schema"], name=TEXT, schema=JSON_SCHEMA, strict=BOOLEAN)
_NAMED = Object(["function"], function=Object(["name"], name=NONEMPTY))
CHAT = Object(
    ["model", "messages"],
    model=NAME,
    messages=Array(MESSAGE, minimum=1, maximum=MAX_MESSAGES),
    max_tokens=MAX_TOKENS,
    max_completion_tokens=MAX_TOKENS,
    **SAMPLING,
    n=CHOICES,
    logprobs=BOOLEAN,
    top_logprobs=integer(0, MAX_TOP_LOGPROBS),
    logit_bias=LOGIT_BIAS,
    parallel_tool_calls=BOOLEAN,
    modalities=Array(replace(one_of("text"), for_provider=TEXT)),
    stream=BOOLEAN,
    stream_options=STREAM_OPTIONS,
    return_token_ids=BOOLEAN,
    tools=Array(
        maximum=MAX_TOOLS,
        items=Tagged(
            {"function": Object(["function"], function=FUNCTION)},
            default="",  # some providers' own tools have none
            provider_kinds={},
        ),
    ),
    tool_choice=tool_choice(_NAMED, Object(["allowed_tools"], allowed_tools=allowed_tools(_NAMED))),
    response_format=Tagged(
        dict.fromkeys(("text", "json_object"), Object([]))
        | {"json_schema": Object(["json_schema"], json_schema=SCHEMA_FORMAT)},
        provider_kinds={},
    ),
    guided_json=_GUIDED,
    structured_outputs=Object([], json=_GUIDED, json_object=BOOLEAN),
    **TEMPLATE,
    thinking=THINKING,
    reasoning=Object([], effort=NAME, enabled=BOOLEAN),
)
PROVIDER_CHAT = Object(
    CHAT.required,
    **{k: v for k, v in CHAT.properties.items() if k not in (*OURS_ALONE, "thinking")},
    **dict.fromkeys(("frequency_penalty", "presence_penalty"), NUMBER),
    **dict.fromkeys(
        ("user", "service_tier", "verbosity", "prompt_cache_key", "safety_identifier"), TEXT
    ),
    **dict.fromkeys(
        ("audio", "prediction", "web_search_options", "thinking", "output_config"), OBJECT
    ),
    function_call=STRING_OR_OBJECT,
    functions=Array(Object(["name"], name=TEXT)),
)
"""What a request to a provider's model may hold. Further fields are not passed on."""


@dataclass(slots=True)
class ChatRequest:
    """A checked request. ``None`` means that the client did not set the field."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    dialect: Dialect  # of the answer
    logprobs: bool = False
    top_logprobs: int = 0
    n: int = 1
    logit_bias: tuple[tuple[int, float], ...] = ()
    response_format: dict[str, Any] | None = None
    """Of type json_object or json_schema; None for text."""
    tool_choice: str = "auto"
    """auto, required, or ``function:name`` for one tool."""
    parallel_tool_calls: bool = True
    template_kwargs: dict[str, Any] = field(default_factory=dict[str, Any])
    """Variables of the chat template; they go before ``thinking`` and ``reasoning_effort``."""
    thinking: bool | None = None
    reasoning_effort: str | None = None
    return_token_ids: bool = False  # vLLM's extension: the exact ids of prompt and answer
    sampling: dict[str, Any] = field(default_factory=dict[str, Any])
    """Those of max_tokens, temperature, top_p, top_k, stop and seed that the client set."""
    raw: dict[str, Any] = field(default_factory=dict[str, Any])  # the wire request
    prompt_ids: list[int] | None = None
    """One prompt of a text completion: tokens to continue, in place of messages."""
    first_choice: int = 0  # index in the response of this prompt's first choice
    earlier: Call | None = None
    """A call that the request names as its past, by an id of the Responses API."""
    left_out: Sequence[str] = ()  # types of tools that the model is not shown
    not_enforced: Sequence[str] = ()  # what the translation could not express
    scored: bool = False  # the answer has the log-probs of the prompt's tokens, too


def chat_request(raw: dict[str, Any]) -> ChatRequest:
    """Check a chat request.

    Raises:
        ApiError: a field is wrong (400); it names the field.
    """
    check_body(CHAT, raw)
    refuse_unsupported(raw, _MISPLACED)
    get = raw.get
    sampling = {
        name: _for_sampler(name, raw[name])
        for name in ("max_tokens", *SAMPLING)
        if get(name) is not None
    }
    if get("max_completion_tokens") is not None:  # the newer name of max_tokens
        sampling["max_tokens"] = raw["max_completion_tokens"]
    if get("top_logprobs") and not get("logprobs"):
        raise invalid("top_logprobs", "top_logprobs needs logprobs to be true")
    choice, tools, dialect = get("tool_choice"), get("tools"), ChatDialect(raw)
    if isinstance(choice, dict) and choice["type"] == "allowed_tools":
        choice, tools = allowed_only(choice["allowed_tools"], tools or [])
    format = guided_format(raw, dialect) or get("response_format")
    thinking, effort = asked_thinking(raw)
    return ChatRequest(
        messages=raw["messages"],
        tools=tools if tools and choice != "none" else None,
        dialect=dialect,
        logprobs=bool(get("logprobs")),
        top_logprobs=get("top_logprobs") or 0,
        n=get("n") or 1,
        logit_bias=tuple(
            (int(key), float(bias)) for key, bias in (get("logit_bias") or {}).items()
        ),
        response_format=None if format is None or format["type"] == "text" else format,
        tool_choice=_tool_choice(choice, tools),
        parallel_tool_calls=get("parallel_tool_calls") is not False,
        template_kwargs=get("chat_template_kwargs") or {},
        thinking=thinking,
        reasoning_effort=effort,
        return_token_ids=bool(get("return_token_ids")),
        sampling=sampling,
        raw=raw,
    )


def translated_request(
    as_chat: Callable[[dict[str, Any]], tuple[dict[str, Any], Dialect]], raw: dict[str, Any]
) -> ChatRequest:
    """Check a request of another protocol to our own model.

    Args:
        as_chat: translates it, and makes its answer's dialect.

    Raises:
        ApiError: a field is wrong (400); it names the field as the dialect does.
    """
    chat, dialect = as_chat(raw)
    left_out, not_enforced = chat.pop("left_out", ()), chat.pop("not_enforced", ())
    try:
        request = chat_request(chat)
    except ApiError as error:
        error.rename(dialect.names)
        raise
    request.raw, request.dialect = raw, dialect
    request.left_out, request.not_enforced = left_out, not_enforced
    return request


def sampling_value(name: str, value: Any) -> Any:
    """Check a sampling field of the settings, and return it as the sampler takes it.

    Raises:
        ApiError: the value is not allowed (400).
    """
    check_body(Object([], **{name: CHAT.properties[name]}), {name: value})
    return _for_sampler(name, value)


def _for_sampler(name: str, value: Any) -> Any:
    if name == "stop":
        return (value,) if isinstance(value, str) else tuple(value)
    if name == "top_k":
        return max(value, 0)
    if name == "temperature":
        return 0.0 if value < GREEDY_BELOW else float(value)
    return float(value) if name == "top_p" else value


def _tool_choice(
    choice: str | dict[str, Any] | None, tools: Sequence[Mapping[str, Any]] | None
) -> str:
    if choice is None or choice in ("auto", "none"):
        return "auto"
    if not tools:
        raise invalid("tool_choice", f"tool_choice {shown(choice)} needs tools to choose from")
    if isinstance(choice, str):
        return choice
    name = choice["function"]["name"]
    if name not in [tool["function"]["name"] for tool in tools]:
        raise invalid("tool_choice", f"tool_choice names {name!r}, which is not among the tools")
    return f"function:{name}"
