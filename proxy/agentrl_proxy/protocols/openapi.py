"""The gateway's own description of its JSON surface, served at /openapi.json.

Knows paths, answers and statuses; what the protocols' requests hold is in request_schemas.py. Does
not check anything: the handlers read raw bodies, and tests hold the two together. Fields nobody
here knows are ignored, so no schema forbids any.
"""

from __future__ import annotations

from agentrl_proxy.protocols import schemas as request_schemas
from agentrl_proxy.protocols.chat import Schema
from agentrl_proxy.protocols.schemas import MESSAGE, NAME, TEXT, an_object, or_null


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


_REWARDS: Schema = {
    "anyOf": [
        {"type": "number"},
        {"type": "object", "additionalProperties": {"type": "number"}},  # several, by name
    ]
}
SCHEMAS: dict[str, Schema] = {
    "ChatCompletionRequest": request_schemas.CHAT,
    "ChatCompletion": an_object(
        ["id", "object", "created", "model", "choices", "usage"],
        id=TEXT,
        object={"const": "chat.completion"},
        created={"type": "integer"},
        model=TEXT,
        choices={
            "type": "array",
            "items": an_object(
                ["index", "message", "finish_reason"],
                index={"type": "integer"},
                message=MESSAGE,
                finish_reason={"enum": ["stop", "length", "tool_calls"]},
            ),
        },
        usage=an_object(["prompt_tokens", "completion_tokens", "total_tokens"]),
    ),
    "CompletionRequest": request_schemas.COMPLETION,
    "Completion": an_object(["id", "object", "choices"], object={"const": "text_completion"}),
    "ResponsesRequest": request_schemas.RESPONSES,
    "Response": an_object(["id", "object", "output"], object={"const": "response"}),
    "MessagesRequest": request_schemas.MESSAGES,
    "CountTokensRequest": request_schemas.COUNT,
    "Message": an_object(["id", "type", "content"], type={"const": "message"}),
    "TokenCount": an_object(["input_tokens"], input_tokens={"type": "integer"}),
    "AnthropicError": an_object(
        ["type", "error"],
        type={"const": "error"},
        error=an_object(["type", "message"], type=TEXT, message=TEXT),
    ),
    "RewardRequest": an_object(
        ["value"],
        value=_REWARDS,
        name=or_null(TEXT),
        response_id=or_null(TEXT),
        explanation=or_null(TEXT),
    ),
    "Reward": an_object(["name", "value", "key"], name=TEXT, value=_REWARDS, key=TEXT),
    "AdapterRequest": an_object(
        ["name", "version", "path"],
        name=NAME,
        version={"type": "integer", "minimum": 0, "maximum": 2**31 - 1},
        path=NAME,
    ),
    "Adapter": an_object(["name", "version"], name=TEXT, version={"type": "integer"}),
    "ExportTraceServiceRequest": {
        "type": "object",
        "description": "OTLP/HTTP, https://opentelemetry.io/docs/specs/otlp/",
    },
    "ExportTraceServiceResponse": {"type": "object"},
    "Models": {
        **an_object(["data"], data={"type": "array", "items": _ref("Model")}),
        "description": "Anthropic's object where the request has an anthropic-version",
    },
    "Model": an_object(["id"], id=TEXT),
    "Health": an_object(
        ["status", "version", "boot_id", "recoveries"],
        status={"enum": ["ok", "unhealthy"]},
        version=TEXT,
        boot_id=TEXT,
        recoveries={"type": "integer"},
    ),
    "Error": an_object(
        ["error"],
        error=an_object(
            ["message", "type", "param", "code"],
            message=TEXT,
            type=TEXT,
            param=or_null(TEXT),
            code=or_null(TEXT),
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
    rollout: Schema = {"name": "rollout_id", "in": "path", "required": True, "schema": TEXT}
    model: Schema = {"name": "model", "in": "path", "required": True, "schema": TEXT}
    chat = _operation("Complete a chat", "ChatCompletion", "ChatCompletionRequest")
    others = {
        "completions": _operation("Complete a text", "Completion", "CompletionRequest"),
        "responses": _operation("Respond", "Response", "ResponsesRequest"),
        "messages": _operation("Answer", "Message", "MessagesRequest", "AnthropicError"),
        "messages/count_tokens": _operation(
            "Count a prompt's tokens", "TokenCount", "CountTokensRequest", "AnthropicError"
        ),
    }
    spans = _operation("Export spans", "ExportTraceServiceResponse", "ExportTraceServiceRequest")
    reward = _operation("Reward the rollout", "Reward", "RewardRequest")
    for prefix, parameters in (("", []), ("/rollouts/{rollout_id}", [rollout])):
        paths[f"{prefix}/v1/models"] = {
            "parameters": parameters,
            "get": _operation("List models", "Models"),
        }
        paths[f"{prefix}/v1/models/{{model}}"] = {
            "parameters": [*parameters, model],
            "get": _operation("Describe a model", "Model"),
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
