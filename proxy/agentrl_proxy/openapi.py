"""The gateway's own description of its JSON surface, served at /openapi.json.

Knows paths, fields and statuses. Does not check anything: the handlers read raw bodies, and a test
holds the two together. Fields nobody here knows are ignored, so no schema forbids any.
"""

from __future__ import annotations

from typing import Any

from agentrl_proxy.openai_types import MAX_CHOICES, MAX_STOPS, MAX_TOP_LOGPROBS, ROLES

Schema = dict[str, Any]


def _object(required: list[str], **properties: Schema) -> Schema:
    return {"type": "object", "required": required, "properties": properties}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


_TEXT: Schema = {"type": "string"}
_NAME: Schema = {"type": "string", "minLength": 1}
_REWARDS: Schema = {
    "anyOf": [
        {"type": "number"},
        {"type": "object", "additionalProperties": {"type": "number"}},  # several, by name
    ]
}
_COUNT: Schema = {"type": "integer", "minimum": 1}

_FUNCTION_CALL = _object(
    ["function"],
    id=_TEXT,
    type={"const": "function"},
    function=_object(["name"], name=_TEXT, arguments={"type": "string"}),
)
_TOOL = _object(
    ["type", "function"],
    type={"const": "function"},
    function=_object(["name"], name=_NAME, description=_TEXT, parameters={"type": "object"}),
)
_PART = _object(["type", "text"], type={"const": "text"}, text=_TEXT)
_MESSAGE = _object(
    ["role"],
    role={"enum": list(ROLES)},
    content=_or_null({"anyOf": [_TEXT, {"type": "array", "items": _PART}]}),
    tool_calls=_or_null({"type": "array", "items": _FUNCTION_CALL}),
    tool_call_id=_TEXT,
)
_STOP = {
    "anyOf": [_NAME, {"type": "array", "items": _NAME, "maxItems": MAX_STOPS}],
}
_RESPONSE_FORMAT = _object(["type"], type={"enum": ["text", "json_object", "json_schema"]})

SCHEMAS: dict[str, Schema] = {
    "ChatCompletionRequest": _object(
        ["model", "messages"],
        model=_NAME,
        messages={"type": "array", "items": _MESSAGE, "minItems": 1},
        max_tokens=_or_null(_COUNT),
        max_completion_tokens=_or_null(_COUNT),
        temperature=_or_null({"type": "number", "minimum": 0, "maximum": 2}),
        top_p=_or_null({"type": "number", "exclusiveMinimum": 0, "maximum": 1}),
        top_k=_or_null({"type": "integer", "minimum": -1}),
        n=_or_null({"type": "integer", "minimum": 1, "maximum": MAX_CHOICES}),
        stop=_or_null(_STOP),
        seed=_or_null({"type": "integer"}),
        logprobs=_or_null({"type": "boolean"}),
        top_logprobs=_or_null({"type": "integer", "minimum": 0, "maximum": MAX_TOP_LOGPROBS}),
        stream=_or_null({"type": "boolean"}),
        stream_options=_or_null(_object([], include_usage={"type": "boolean"})),
        tools=_or_null({"type": "array", "items": _TOOL}),
        tool_choice=_or_null({"anyOf": [{"enum": ["none", "auto", "required"]}, _object([])]}),
        response_format=_or_null(_RESPONSE_FORMAT),
    ),
    "ChatCompletion": _object(
        ["id", "object", "created", "model", "choices", "usage"],
        id=_TEXT,
        object={"const": "chat.completion"},
        created={"type": "integer"},
        model=_TEXT,
        choices={
            "type": "array",
            "items": _object(
                ["index", "message", "finish_reason"],
                index={"type": "integer"},
                message=_MESSAGE,
                finish_reason={"enum": ["stop", "length", "tool_calls"]},
            ),
        },
        usage=_object(["prompt_tokens", "completion_tokens", "total_tokens"]),
    ),
    "CompletionRequest": _object(
        ["model", "prompt"],
        model=_NAME,
        prompt={"description": "text, texts, token ids, or lists of token ids"},
    ),
    "Completion": _object(["id", "object", "choices"], object={"const": "text_completion"}),
    "ResponsesRequest": {
        **_object(["model", "input"], model=_NAME),
        "description": "https://platform.openai.com/docs/api-reference/responses",
    },
    "Response": _object(["id", "object", "output"], object={"const": "response"}),
    "MessagesRequest": {
        **_object(["model", "messages"], model=_NAME, messages={"type": "array"}),
        "description": "https://docs.anthropic.com/en/api/messages",
    },
    "Message": _object(["id", "type", "content"], type={"const": "message"}),
    "TokenCount": _object(["input_tokens"], input_tokens={"type": "integer"}),
    "AnthropicError": _object(
        ["type", "error"],
        type={"const": "error"},
        error=_object(["type", "message"], type=_TEXT, message=_TEXT),
    ),
    "RewardRequest": _object(
        ["value"],
        value=_REWARDS,
        name=_or_null(_TEXT),
        response_id=_or_null(_TEXT),
        explanation=_or_null(_TEXT),
    ),
    "Reward": _object(["name", "value", "key"], name=_TEXT, value=_REWARDS, key=_TEXT),
    "AdapterRequest": _object(
        ["name", "version", "path"],
        name=_NAME,
        version={"type": "integer", "minimum": 0, "maximum": 2**31 - 1},
        path=_NAME,
    ),
    "Adapter": _object(["name", "version"], name=_TEXT, version={"type": "integer"}),
    "ExportTraceServiceRequest": {
        "type": "object",
        "description": "OTLP/HTTP, https://opentelemetry.io/docs/specs/otlp/",
    },
    "ExportTraceServiceResponse": {"type": "object"},
    "Models": _object(["object", "data"], object={"const": "list"}, data={"type": "array"}),
    "Health": _object(
        ["status", "version", "boot_id", "recoveries"],
        status={"enum": ["ok", "unhealthy"]},
        version=_TEXT,
        boot_id=_TEXT,
        recoveries={"type": "integer"},
    ),
    "Error": _object(
        ["error"],
        error=_object(
            ["message", "type", "param", "code"],
            message=_TEXT,
            type=_TEXT,
            param=_or_null(_TEXT),
            code=_or_null(_TEXT),
        ),
    ),
}


def _json(name: str) -> Schema:
    return {"application/json": {"schema": _ref(name)}}


def _operation(summary: str, answer: str, body: str | None = None, error: str = "Error") -> Schema:
    operation: Schema = {
        "summary": summary,
        "responses": {
            "200": {"description": "done", "content": _json(answer)},
            "default": {"description": "an error", "content": _json(error)},
        },
    }
    if body is not None:
        operation["requestBody"] = {"required": True, "content": _json(body)}
    return operation


def _paths() -> dict[str, Schema]:
    paths: dict[str, Schema] = {
        "/healthz": {"get": _operation("Whether it can answer", "Health")},
        "/admin/adapters": {
            "post": _operation("Answer with this adapter version", "Adapter", "AdapterRequest")
        },
    }
    rollout: Schema = {"name": "rollout_id", "in": "path", "required": True, "schema": _TEXT}
    chat = _operation("Complete a chat", "ChatCompletion", "ChatCompletionRequest")
    others = {
        "completions": _operation("Complete a text", "Completion", "CompletionRequest"),
        "responses": _operation("Respond", "Response", "ResponsesRequest"),
        "messages": _operation("Answer", "Message", "MessagesRequest", "AnthropicError"),
        "messages/count_tokens": _operation(
            "Count a prompt's tokens", "TokenCount", "MessagesRequest", "AnthropicError"
        ),
    }
    spans = _operation("Export spans", "ExportTraceServiceResponse", "ExportTraceServiceRequest")
    reward = _operation("Reward the rollout", "Reward", "RewardRequest")
    for prefix, parameters in (("", []), ("/rollouts/{rollout_id}", [rollout])):
        paths[f"{prefix}/v1/models"] = {
            "parameters": parameters,
            "get": _operation("List models", "Models"),
        }
        paths[f"{prefix}/v1/chat/completions"] = {"parameters": parameters, "post": chat}
        for name, operation in others.items():
            paths[f"{prefix}/v1/{name}"] = {"parameters": parameters, "post": operation}
        paths[f"{prefix}/v1/traces"] = {"parameters": parameters, "post": spans}
    paths["/rollouts/{rollout_id}/v1/rewards"] = {"parameters": [rollout], "post": reward}
    return paths


def document(version: str) -> Schema:
    """The OpenAPI document."""
    return {
        "openapi": "3.1.0",
        "info": {"title": "agentrl gateway", "version": version},
        "security": [{"key": []}],
        "paths": _paths(),
        "components": {
            "schemas": SCHEMAS,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }
