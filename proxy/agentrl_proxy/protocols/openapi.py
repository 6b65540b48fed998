"""Describe the gateway's JSON API as an OpenAPI document, served at /openapi.json.

Knows paths, answers and statuses. The requests' schemas come from each protocol's field types.
"""

from __future__ import annotations

from agentrl_proxy.protocols.chat import CHAT, MESSAGE
from agentrl_proxy.protocols.completions import COMPLETION
from agentrl_proxy.protocols.fields import NAME, TEXT, Schema, integer, or_null
from agentrl_proxy.protocols.messages import COUNT, MESSAGES
from agentrl_proxy.protocols.responses import RESPONSES

_OPENAI = "https://platform.openai.com/docs/api-reference"
_ANTHROPIC = "https://docs.anthropic.com/en/api"
_TEXT = TEXT.schema


def _object(required: list[str], /, **properties: Schema) -> Schema:
    return {"type": "object", "required": required, "properties": properties}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


_REWARDS: Schema = {
    "anyOf": [
        {"type": "number"},
        {"type": "object", "additionalProperties": {"type": "number"}},  # several, by name
    ]
}
SCHEMAS: dict[str, Schema] = {
    "ChatCompletionRequest": CHAT.schema,
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
                message=MESSAGE.schema,
                finish_reason={"enum": ["stop", "length", "tool_calls"]},
            ),
        },
        usage=_object(["prompt_tokens", "completion_tokens", "total_tokens"]),
    ),
    "CompletionRequest": COMPLETION.schema,
    "Completion": _object(["id", "object", "choices"], object={"const": "text_completion"}),
    "ResponsesRequest": {**RESPONSES.schema, "description": f"{_OPENAI}/responses"},
    "Response": _object(["id", "object", "output"], object={"const": "response"}),
    "MessagesRequest": {**MESSAGES.schema, "description": f"{_ANTHROPIC}/messages"},
    "CountTokensRequest": {**COUNT.schema, "description": f"{_ANTHROPIC}/messages-count-tokens"},
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
        name=or_null(_TEXT),
        response_id=or_null(_TEXT),
        explanation=or_null(_TEXT),
    ),
    "Reward": _object(["name", "value", "key"], name=_TEXT, value=_REWARDS, key=_TEXT),
    "AdapterRequest": _object(
        ["name", "version", "path"],
        name=NAME.schema,
        version=integer(0, 2**31 - 1).schema,
        path=NAME.schema,
    ),
    "Adapter": _object(["name", "version"], name=_TEXT, version={"type": "integer"}),
    "ExportTraceServiceRequest": {
        "type": "object",
        "description": "OTLP/HTTP, https://opentelemetry.io/docs/specs/otlp/",
    },
    "ExportTraceServiceResponse": {"type": "object"},
    "Models": {
        **_object(["data"], data={"type": "array", "items": _ref("Model")}),
        "description": "Anthropic's object where the request has an anthropic-version",
    },
    "Model": _object(["id"], id=_TEXT),
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
            param=or_null(_TEXT),
            code=or_null(_TEXT),
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
    model: Schema = {"name": "model", "in": "path", "required": True, "schema": _TEXT}
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
