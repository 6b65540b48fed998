"""The request body of ``/v1/chat/completions``, checked field by field.

Knows OpenAI's field names, their types and ranges. Does not know templates, tokens or who asks.
A table instead of a pydantic model: the model costs a third more CPU per request, and its error
texts name Python types. Fields nobody here knows are ignored, as frameworks send many.

``tool_choice`` none means that the model does not see the tools at all: it cannot call what it
does not know, and nothing has to be masked.

``parallel_tool_calls`` false is enforced by a grammar where there is one (see constraints), and for
``tool_choice`` auto by ending the answer where a second call begins, as a stop string would: no
mask, the raw policy's log-probs, every sampled token recorded (``params["cut_at_second_call"]``).

A function's ``strict`` is enforced wherever a grammar is, and not for ``tool_choice`` auto by
itself: frameworks send it with every request (openai-agents, langchain), so every call of such an
agent would be drawn from a masked policy that is not the one that is trained, which never learns
the form that the mask writes for it; and an answer that breaks a schema is a failure that a reward
should see. The call says so in ``params["not_enforced"]``, as it does of parallel calls with
templates whose calls cannot be told apart while they are written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import orjson

from agentrl_proxy.errors import ApiError, invalid
from agentrl_proxy.protocols.chat_objects import ChatDialect, Dialect

Schema = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
MAX_CHOICES = 128
MAX_STOPS = 16
MAX_TOP_LOGPROBS = 20
MAX_BIASES = 1024
MAX_DEPTH = 254  # orjson's own, and well within what the template and the store can take


@dataclass(slots=True)
class ChatRequest:
    """A checked request. ``None`` means the client left it to us."""

    model: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    dialect: Dialect  # of the answer
    stream: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    n: int = 1
    logit_bias: tuple[tuple[int, float], ...] = ()
    response_format: dict[str, Any] | None = None
    """Of type json_object or json_schema; None for text."""
    tool_choice: str = "auto"
    """auto, required, or the one tool's name as ``function:name``."""
    parallel_tool_calls: bool = True
    include_usage: bool = False  # a stream ends with its usage
    return_token_ids: bool = False  # vLLM's extension: the exact ids of prompt and answer
    sampling: dict[str, Any] = field(default_factory=dict[str, Any])
    """Of max_tokens, temperature, top_p, top_k, stop and seed: those the client set."""
    raw: dict[str, Any] = field(default_factory=dict[str, Any])  # the wire request

    @property
    def wants_of_calls(self) -> list[str]:
        """What it wants of tool calls that only a grammar can give."""
        found: list[str] = []
        if self.tools and not self.parallel_tool_calls:
            found.append("parallel_tool_calls")
        if any(tool["function"].get("strict") for tool in self.tools or ()):
            found.append("strict")
        return found


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _wrong(param: str, value: Any, allowed: str) -> ApiError:
    return invalid(param, f"{param} must be {allowed}; got {_shown(value)}")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_stop(value: Any) -> bool:
    stops = [value] if isinstance(value, str) else value
    return (
        isinstance(stops, list)
        and len(stops) <= MAX_STOPS
        and all(isinstance(stop, str) and stop for stop in stops)
    )


def _is_bias(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and len(value) <= MAX_BIASES
        and all(key.isascii() and key.isdigit() and len(key) < 10 for key in value)
        and all(_is_number(bias) and -100 <= bias <= 100 for bias in value.values())
    )


class Field(NamedTuple):
    """What a field may be: told by code, to a person and to a program. ``null`` always means "not
    set". A test generates from the schema, and holds the three together."""

    check: Callable[[Any], bool]
    allowed: str
    schema: Schema


_FLAG = Field(lambda v: isinstance(v, bool), "true or false", {"type": "boolean"})
_LARGEST = 2**64 - 1  # of JSON's integers; orjson reads greater ones as floats
_LENGTH = Field(
    lambda v: _is_int(v) and v >= 1,
    "an integer of at least 1",
    {"type": "integer", "minimum": 1, "maximum": _LARGEST},
)
_NONEMPTY: Schema = {"type": "string", "minLength": 1}

FIELDS: dict[str, Field] = {
    "max_tokens": _LENGTH,
    "max_completion_tokens": _LENGTH,
    "temperature": Field(
        lambda v: _is_number(v) and 0 <= v <= 2,
        "a number from 0 to 2",
        {"type": "number", "minimum": 0, "maximum": 2},
    ),
    "top_p": Field(
        lambda v: _is_number(v) and 0 < v <= 1,
        "a number above 0 and up to 1",
        {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    ),
    "top_k": Field(
        lambda v: _is_int(v) and v >= -1,
        "an integer; 0 and -1 mean all tokens",
        {"type": "integer", "minimum": -1, "maximum": _LARGEST},
    ),
    "n": Field(
        lambda v: _is_int(v) and 1 <= v <= MAX_CHOICES,
        f"an integer from 1 to {MAX_CHOICES}",
        {"type": "integer", "minimum": 1, "maximum": MAX_CHOICES},
    ),
    "stop": Field(
        _is_stop,
        f"a non-empty string or a list of up to {MAX_STOPS} of them",
        {"anyOf": [_NONEMPTY, {"type": "array", "items": _NONEMPTY, "maxItems": MAX_STOPS}]},
    ),
    "seed": Field(
        _is_int, "an integer", {"type": "integer", "minimum": -(2**63), "maximum": _LARGEST}
    ),
    "logprobs": _FLAG,
    "top_logprobs": Field(
        lambda v: _is_int(v) and 0 <= v <= MAX_TOP_LOGPROBS,
        f"an integer from 0 to {MAX_TOP_LOGPROBS}",
        {"type": "integer", "minimum": 0, "maximum": MAX_TOP_LOGPROBS},
    ),
    "logit_bias": Field(
        _is_bias,
        f"an object of up to {MAX_BIASES} token ids, each with a number from -100 to 100",
        {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,9}$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            "maxProperties": MAX_BIASES,
        },
    ),
    "parallel_tool_calls": _FLAG,
    "modalities": Field(
        lambda v: v == ["text"],
        '["text"]; this model writes text only',
        {"type": "array", "items": {"const": "text"}, "minItems": 1, "maxItems": 1},
    ),
    "stream": _FLAG,
    "return_token_ids": _FLAG,
    "stream_options": Field(
        lambda v: isinstance(v, dict) and isinstance(v.get("include_usage"), bool | None),
        'an object like {"include_usage": true}',
        {
            "type": "object",
            "properties": {"include_usage": {"anyOf": [{"type": "boolean"}, {"type": "null"}]}},
        },
    ),
    # What is in these is checked below, and described in request_schemas.py.
    "tools": Field(lambda v: isinstance(v, list), "a list", {"type": "array"}),
    "tool_choice": Field(
        lambda v: isinstance(v, str | dict), "none, auto, required or an object", {}
    ),
    "response_format": Field(lambda v: isinstance(v, dict), "an object", {"type": "object"}),
}


def sampling_value(name: str, value: Any) -> Any:
    """Check one sampling field, wherever it came from: a request, a config, an attempt."""
    field = FIELDS[name]
    if not field.check(value):
        raise _wrong(name, value, field.allowed)
    if name == "stop":
        return (value,) if isinstance(value, str) else tuple(value)
    if name == "top_k":
        return max(value, 0)
    if name in ("temperature", "top_p"):
        return float(value)
    return value


def read_object(body: bytes) -> dict[str, Any]:
    try:
        raw = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise invalid(None, f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(raw, dict):
        raise invalid(None, f"the body must be a JSON object; got {_shown(raw)}")
    _check_depth(body, raw)
    return raw


def chat_request(raw: dict[str, Any]) -> ChatRequest:
    """The checked request, or an ApiError that names the field that is wrong."""
    for name in raw.keys() & FIELDS.keys():
        value = raw[name]
        if value is not None and not FIELDS[name].check(value):
            raise _wrong(name, value, FIELDS[name].allowed)
    model = raw.get("model")
    if not isinstance(model, str) or not model or "\0" in model:  # PostgreSQL takes no NUL
        raise _wrong("model", model, "a non-empty string without NUL characters")

    sampling: dict[str, Any] = {}
    for name in ("max_tokens", "temperature", "top_p", "top_k", "stop", "seed"):
        if raw.get(name) is not None:
            sampling[name] = sampling_value(name, raw[name])
    if raw.get("max_completion_tokens") is not None:  # the newer name of max_tokens
        sampling["max_tokens"] = raw["max_completion_tokens"]

    logprobs = bool(raw.get("logprobs"))
    top_logprobs = raw.get("top_logprobs") or 0
    if top_logprobs and not logprobs:
        raise invalid("top_logprobs", "top_logprobs needs logprobs to be true")
    choice = raw.get("tool_choice")
    tools = _tools(raw.get("tools"), choice)
    parallel = raw.get("parallel_tool_calls")
    biases = raw.get("logit_bias") or {}
    include_usage = bool((raw.get("stream_options") or {}).get("include_usage"))
    return ChatRequest(
        model=model,
        messages=_messages(raw.get("messages")),
        tools=tools,
        dialect=ChatDialect(include_usage=include_usage),
        stream=bool(raw.get("stream")),
        logprobs=logprobs,
        top_logprobs=top_logprobs,
        n=raw.get("n") or 1,
        logit_bias=tuple((int(key), float(bias)) for key, bias in biases.items()),
        response_format=_response_format(raw.get("response_format")),
        tool_choice=_tool_choice(choice, tools),
        parallel_tool_calls=parallel is not False,
        include_usage=include_usage,
        return_token_ids=bool(raw.get("return_token_ids")),
        sampling=sampling,
        raw=raw,
    )


def _check_depth(body: bytes, raw: dict[str, Any]) -> None:
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return  # it cannot be deeper than it has brackets
    try:
        orjson.dumps(raw)  # the cheapest way to walk it; refuses what is deeper than MAX_DEPTH
    except TypeError:
        message = f"the body is nested more than {MAX_DEPTH} levels deep"
        raise invalid(None, message, code="invalid_json") from None


def _response_format(value: dict[str, Any] | None) -> dict[str, Any] | None:
    if value is None:
        return None
    allowed = ("text", "json_object", "json_schema")
    kind = value.get("type")
    if kind not in allowed:
        raise _wrong("response_format.type", kind, ", ".join(allowed))
    if kind == "json_schema":
        schema = value.get("json_schema")
        if not isinstance(schema, dict):
            raise _wrong("response_format.json_schema", schema, "an object with a schema")
        if not isinstance(schema.get("schema"), dict):
            where = "response_format.json_schema.schema"
            raise _wrong(where, schema.get("schema"), "an object, the JSON schema")
        _check_strict(schema, "response_format.json_schema")
    return None if kind == "text" else value


# --- somebody else's models

_NUMBER = (_is_number, "a number")
_INTEGER = (_is_int, "an integer")
_BOOLEAN = (lambda v: isinstance(v, bool), "true or false")
_STRING = (_is_text, "a string")
_LIST = (lambda v: isinstance(v, list), "a list")
_OBJECT = (lambda v: isinstance(v, dict), "an object")
_WORD_OR_OBJECT = (lambda v: isinstance(v, str | dict), "a string or an object")
_SHAPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("temperature", "top_p", "frequency_penalty", "presence_penalty"), _NUMBER),
    **dict.fromkeys(
        ("max_tokens", "max_completion_tokens", "top_k", "seed", "top_logprobs"), _INTEGER
    ),
    **dict.fromkeys(("logprobs", "parallel_tool_calls"), _BOOLEAN),
    **dict.fromkeys(
        ("user", "service_tier", "verbosity", "prompt_cache_key", "safety_identifier"), _STRING
    ),
    **dict.fromkeys(("tools", "functions", "modalities"), _LIST),
    **dict.fromkeys(
        ("logit_bias", "response_format", "audio", "prediction", "web_search_options", "thinking",
         "output_config"), _OBJECT
    ),
    **dict.fromkeys(("tool_choice", "function_call", "reasoning_effort"), _WORD_OR_OBJECT),
    "stop": (
        lambda v: isinstance(v, str) or (isinstance(v, list) and all(map(_is_text, v))),
        "a string or a list of strings",
    ),
}  # fmt: skip


def check_values(raw: Mapping[str, Any]) -> None:
    """The JSON types of what a request to somebody else's model sets. LiteLLM and the SDKs below it
    fall over anything else, or hand it on. Ranges are the provider's to judge."""
    for name, (check, allowed) in _SHAPES.items():
        value = raw.get(name)
        if value is not None and not check(value):
            raise _wrong(name, value, allowed)


def check_chat(raw: Mapping[str, Any]) -> None:
    """``check_values``, and what messages, tools and the response format are made of. Kinds of
    parts, tools and formats that are not ours are the provider's to judge."""
    check_values(raw)
    _messages(raw.get("messages"), ours=False)
    for i, tool in enumerate(raw.get("tools") or []):
        if not isinstance(tool, dict) or not isinstance(tool.get("type", "function"), str):
            raise _wrong(f"tools[{i}]", tool, "an object with a type")
        if tool.get("type") == "function":
            _tools([tool], None, at=i)
    for i, function in enumerate(raw.get("functions") or []):
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _wrong(f"functions[{i}]", function, "an object with a name")
    format = raw.get("response_format")
    if format is not None:
        if not isinstance(format.get("type"), str):
            raise _wrong("response_format.type", format.get("type"), "a string")
        if format["type"] == "json_schema":
            _response_format(format)


def _check_strict(value: Mapping[str, Any], where: str) -> None:
    if not isinstance(value.get("strict"), bool | None):
        raise _wrong(f"{where}.strict", value["strict"], "true or false")


def _tool_choice(choice: Any, tools: list[dict[str, Any]] | None) -> str:
    if choice is None or choice in ("auto", "none"):
        return "auto"
    if not tools:
        raise invalid("tool_choice", f"tool_choice {_shown(choice)} needs tools to choose from")
    if choice == "required":
        return "required"
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if choice.get("type") != "function" or not isinstance(name, str):
        like = '{"type": "function", "function": {"name": "..."}}'
        raise _wrong("tool_choice", choice, f"none, auto, required or an object like {like}")
    if name not in [tool["function"]["name"] for tool in tools]:
        raise invalid("tool_choice", f"tool_choice names {name!r}, which is not among the tools")
    return f"function:{name}"


def _tools(tools: list[Any] | None, choice: Any, at: int = 0) -> list[dict[str, Any]] | None:
    if isinstance(choice, str) and choice not in ("none", "auto", "required"):
        raise _wrong("tool_choice", choice, "none, auto, required or an object")
    for i, tool in enumerate(tools or [], at):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type") != "function":
            raise _wrong(f"tools[{i}]", tool, 'an object like {"type": "function", "function": {}}')
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise _wrong(f"tools[{i}].function.name", function.get("name"), "a non-empty string")
        if not isinstance(function.get("parameters"), dict | None):
            where = f"tools[{i}].function.parameters"
            raise _wrong(where, function["parameters"], "an object, the JSON schema")
        _check_strict(function, f"tools[{i}].function")
    return tools if tools and choice != "none" else None


def _messages(messages: Any, *, ours: bool = True) -> list[dict[str, Any]]:
    """
    Args:
        ours: whether our model answers, which reads text only.
    """
    if not isinstance(messages, list) or not messages:
        raise _wrong("messages", messages, "a non-empty list")
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if not isinstance(message, dict):
            raise _wrong(where, message, "an object")
        role = message.get("role")
        if role not in ROLES:
            raise _wrong(f"{where}.role", role, ", ".join(ROLES))
        content = message.get("content")
        if content is None and role != "assistant":
            raise _wrong(f"{where}.content", content, "a string or a list of content parts")
        if content is not None and not isinstance(content, str | list):
            raise _wrong(f"{where}.content", content, "a string or a list of content parts")
        if isinstance(content, list):
            check = _check_parts if ours else _check_any_parts
            check(content, f"{where}.content")
        for key in ("name", "tool_call_id", "reasoning_content"):
            if not isinstance(message.get(key), str | None):
                raise _wrong(f"{where}.{key}", message[key], "a string")
        calls = message.get("tool_calls")
        if calls is not None:
            _check_tool_calls(calls, f"{where}.tool_calls")
    return messages


_OTHER_MEDIA = tuple(  # no set: what a client calls a type need not be hashable
    f"{prefix}{kind}{suffix}"
    for kind in ("image", "audio", "video", "file", "document")
    for prefix, suffix in (("", ""), ("input_", ""), ("", "_url"))
)


def _check_parts(parts: list[Any], where: str) -> None:
    for i, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text", part.get("refusal")) if isinstance(part, dict) else None
        if kind in ("text", "refusal") and isinstance(text, str):
            continue
        if kind in _OTHER_MEDIA:
            raise invalid(
                f"{where}[{i}]",
                f"{where}[{i}] is of type {kind}; this model reads text only",
                code="unsupported_content",
            )
        raise _wrong(f"{where}[{i}]", part, 'an object like {"type": "text", "text": "..."}')


def _check_any_parts(parts: list[Any], where: str) -> None:
    for i, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise _wrong(f"{where}[{i}]", part, "an object with a type")
        if kind in ("text", "refusal"):
            _check_parts([part], where)
        if kind in ("image_url", "video_url", "audio_url"):
            url = part.get(kind)
            if not isinstance(url.get("url") if isinstance(url, dict) else url, str):
                raise _wrong(f"{where}[{i}].{kind}", url, "an object with a url")
        if kind in ("input_audio", "file") and not isinstance(part.get(kind), dict):
            raise _wrong(f"{where}[{i}].{kind}", part.get(kind), "an object")


def _check_tool_calls(calls: Any, where: str) -> None:
    if not isinstance(calls, list):
        raise _wrong(where, calls, "a list")
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _wrong(f"{where}[{i}]", call, "an object with function.name")
        if not isinstance(function.get("arguments", ""), str):
            arguments = function["arguments"]
            raise _wrong(f"{where}[{i}].function.arguments", arguments, "a string of JSON")
