"""JSON schemas of what the protocols' requests may hold, for the OpenAPI document.

Knows fields, and how they nest. Does not check anything: the parsers (openai_types, completions,
responses, messages) do, and tests generate requests from here and hold the two together. Scalars
come from the parsers' own table. Fields nobody here knows are ignored, so no schema forbids any;
what depends on several fields at once (``tool_choice`` needs ``tools``) is said in descriptions.
"""

from __future__ import annotations

from typing import Any

from agentrl_proxy.protocols.chat import (
    FIELDS,
    MAX_CHOICES,
    MAX_TOP_LOGPROBS,
    ROLES,
    Schema,
)

TEXT: Schema = {"type": "string"}
NAME: Schema = {"type": "string", "minLength": 1, "pattern": "^[^\\x00]*$"}
_NONEMPTY: Schema = {"type": "string", "minLength": 1}
_ANY: Schema = {"type": "object"}


def an_object(required: list[str], /, **properties: Schema) -> Schema:
    return {"type": "object", "required": required, "properties": properties}


def or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _list(items: Schema, **more: Any) -> Schema:
    return {"type": "array", "items": items, **more}


def _or_list(items: Schema) -> Schema:
    return {"anyOf": [TEXT, _list(items)]}


def _typed(kind: str, required: list[str], /, **properties: Schema) -> Schema:
    """An object told from others by its ``type``."""
    return an_object(["type", *required], type={"const": kind}, **properties)


def _fields(*names: str) -> dict[str, Schema]:
    return {name: or_null(FIELDS[name].schema) for name in names}


_SAMPLING = ("temperature", "top_p", "top_k", "stop", "seed")

# --- Chat Completions

_STRICT = or_null({"type": "boolean"})
_FUNCTION = an_object(
    ["name"], name=_NONEMPTY, description=or_null(TEXT), parameters=or_null(_ANY), strict=_STRICT
)
_TOOL = _typed("function", ["function"], function=_FUNCTION)
TOOL_CALL = an_object(
    ["function"],
    id=TEXT,
    type={"const": "function"},
    function=an_object(["name"], name=TEXT, arguments=TEXT),
)
_PART = {
    "anyOf": [_typed("text", ["text"], text=TEXT), _typed("refusal", ["refusal"], refusal=TEXT)]
}
_CONTENT = _or_list(_PART)
MESSAGE: Schema = {
    "anyOf": [
        an_object(
            ["role", "content"],
            role={"enum": [role for role in ROLES if role != "assistant"]},
            content=_CONTENT,
            name=or_null(TEXT),
            tool_call_id=or_null(TEXT),
        ),
        an_object(
            ["role"],
            role={"const": "assistant"},
            content=or_null(_CONTENT),
            reasoning_content=or_null(TEXT),
            tool_calls=or_null(_list(TOOL_CALL)),
        ),
    ]
}
_JSON_SCHEMA = an_object(["schema"], name=TEXT, schema=_ANY, strict=_STRICT)
_RESPONSE_FORMAT: Schema = {
    "anyOf": [
        _typed("text", []),
        _typed("json_object", []),
        _typed("json_schema", ["json_schema"], json_schema=_JSON_SCHEMA),
    ]
}
_NAMED_TOOL = _typed("function", ["function"], function=an_object(["name"], name=_NONEMPTY))

CHAT: Schema = an_object(
    ["model", "messages"],
    model=NAME,
    messages=_list(MESSAGE, minItems=1),
    **_fields(*FIELDS),
)
CHAT["properties"] |= {
    "tools": or_null(_list(_TOOL)),
    "tool_choice": {
        **or_null({"anyOf": [{"enum": ["none", "auto", "required"]}, _NAMED_TOOL]}),
        "description": "required, or one of the tools by its name: there must be tools",
    },
    "response_format": or_null(_RESPONSE_FORMAT),
}
CHAT["properties"]["top_logprobs"]["description"] = "needs logprobs to be true"

# --- legacy Completions

_TOKEN_IDS = _list({"type": "integer", "minimum": 0, "maximum": 2**31 - 1}, minItems=1)
COMPLETION: Schema = an_object(
    ["model", "prompt"],
    model=NAME,
    prompt={
        "anyOf": [
            _NONEMPTY,
            _list(_NONEMPTY, minItems=1),
            _TOKEN_IDS,
            _list(_TOKEN_IDS, minItems=1),
        ],
        "description": "text, texts, token ids, or lists of token ids",
    },
    max_tokens=or_null({**FIELDS["max_tokens"].schema, "minimum": 0}),
    echo=or_null({"type": "boolean"}),
    logprobs=or_null({"type": "integer", "minimum": 0, "maximum": MAX_TOP_LOGPROBS}),
    best_of=or_null({"type": "integer", "minimum": 1, "maximum": MAX_CHOICES}),
    suffix={"type": "null"},
    **_fields(*_SAMPLING, "n", "stream", "stream_options", "logit_bias", "return_token_ids"),
)
COMPLETION["properties"]["best_of"]["description"] = "no other number than n"

# --- Responses

_INPUT_PART = {
    "anyOf": [
        _typed("input_text", ["text"], text=TEXT),
        _typed("output_text", ["text"], text=TEXT),
        _typed("refusal", ["refusal"], refusal=TEXT),
    ]
}
_ITEM: Schema = {
    "anyOf": [
        an_object(
            ["role", "content"],
            type={"const": "message"},
            role={"enum": ["user", "assistant", "system", "developer"]},
            content=_or_list(_INPUT_PART),
        ),
        _typed(
            "function_call", ["call_id", "name", "arguments"],
            call_id=TEXT, name=TEXT, arguments=TEXT,
        ),
        {
            **_typed(
                "function_call_output", ["call_id", "output"],
                call_id=TEXT, output=_or_list(_INPUT_PART),
            ),
            "description": "its call_id is that of a function_call before it",
        },
        _typed(
            "reasoning", ["summary"],
            summary=_list(_typed("summary_text", ["text"], text=TEXT)),
        ),
    ]
}  # fmt: skip
_FLAT_TOOL = _typed(
    "function", ["name"],
    name=_NONEMPTY, description=or_null(TEXT), parameters=or_null(_ANY), strict=_STRICT,
)  # fmt: skip
_TEXT_FORMAT: Schema = {
    "anyOf": [
        _typed("text", []),
        _typed("json_object", []),
        _typed("json_schema", ["schema"], name=TEXT, schema=_ANY, strict=_STRICT),
    ]
}
RESPONSES: Schema = an_object(
    ["model", "input"],
    model=NAME,
    input={"anyOf": [_NONEMPTY, _list(_ITEM, minItems=1)]},
    instructions=or_null(TEXT),
    max_output_tokens=or_null(FIELDS["max_tokens"].schema),
    max_tool_calls=or_null({**FIELDS["max_tokens"].schema, "minimum": 0}),
    store=or_null({"type": "boolean"}),
    truncation=or_null({"enum": ["auto", "disabled"]}),
    tools=or_null(_list(_FLAT_TOOL)),
    tool_choice=or_null(
        {"anyOf": [{"enum": ["none", "auto", "required"]}, _typed("function", ["name"], name=TEXT)]}
    ),
    text=or_null(an_object([], format=or_null(_TEXT_FORMAT))),
    include=or_null(_list({"enum": ["message.output_text.logprobs"]})),
    reasoning=or_null(
        an_object([], effort=or_null({"enum": ["minimal", "low", "medium", "high"]}))
    ),
    metadata=or_null({"type": "object", "additionalProperties": TEXT}),
    **_fields(*_SAMPLING, "top_logprobs", "stream", "parallel_tool_calls"),
)
RESPONSES["description"] = "https://platform.openai.com/docs/api-reference/responses"

# --- Messages

_TEXT_BLOCK = _typed("text", ["text"], text=TEXT)
_BLOCK: Schema = {
    "anyOf": [
        _TEXT_BLOCK,
        _typed("tool_use", ["id", "name", "input"], id=_NONEMPTY, name=_NONEMPTY, input=_ANY),
        _typed(
            "tool_result", ["tool_use_id"],
            tool_use_id=_NONEMPTY, content=_or_list(_TEXT_BLOCK), is_error={"type": "boolean"},
        ),
        _typed("thinking", ["thinking"], thinking=TEXT, signature=TEXT),
        _typed("redacted_thinking", ["data"], data=TEXT),
    ]
}  # fmt: skip
_CLIENT_TOOL = an_object(
    ["name", "input_schema"],
    type={"const": "custom"},
    name=_NONEMPTY,
    description=TEXT,
    input_schema=_ANY,
    strict={"type": "boolean"},
)
_TOOL_USE: Schema = {
    "anyOf": [
        _typed("auto", [], disable_parallel_tool_use={"type": "boolean"}),
        _typed("any", [], disable_parallel_tool_use={"type": "boolean"}),
        _typed("tool", ["name"], name=TEXT, disable_parallel_tool_use={"type": "boolean"}),
        _typed("none", []),
    ]
}
COUNT: Schema = an_object(
    ["model", "messages"],
    model=NAME,
    messages=_list(
        {"anyOf": [
            an_object(
                ["role", "content"],
                role={"enum": ["user", "system"]},
                content={"anyOf": [_NONEMPTY, _list(_BLOCK, minItems=1)]},
            ),
            an_object(["role", "content"], role={"const": "assistant"}, content=_or_list(_BLOCK)),
        ]},
        minItems=1,
        description="the last one is the user's",
    ),
    system=or_null(_or_list(_TEXT_BLOCK)),
    tools=or_null(_list(_CLIENT_TOOL)),
    tool_choice=or_null(_TOOL_USE),
    thinking=or_null(
        {"anyOf": [
            _typed("enabled", [], budget_tokens=FIELDS["max_tokens"].schema),
            _typed("disabled", []),
        ]}
    ),
)  # fmt: skip
COUNT["description"] = "https://docs.anthropic.com/en/api/messages-count-tokens"
MESSAGES: Schema = an_object(
    [*COUNT["required"], "max_tokens"],
    **COUNT["properties"],
    max_tokens=FIELDS["max_tokens"].schema,
    stop_sequences=or_null(_list(_NONEMPTY, maxItems=16)),
    output_config=or_null(
        an_object([], format=or_null(_typed("json_schema", ["schema"], schema=_ANY)))
    ),
    **_fields("temperature", "top_p", "top_k", "stream"),
)
MESSAGES["description"] = "https://docs.anthropic.com/en/api/messages"
