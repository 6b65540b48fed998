"""Describe the gateway's JSON API as an OpenAPI document, served at /openapi.json.

Knows paths, answers and statuses. The requests' schemas come from each protocol's field types.
"""

from __future__ import annotations

import re
from dataclasses import replace

from agentrl_proxy.protocols.chat import CHAT, MESSAGE
from agentrl_proxy.protocols.completions import COMPLETION
from agentrl_proxy.protocols.embeddings import EMBEDDINGS
from agentrl_proxy.protocols.fields import ANYTHING, TEXT, Object, Schema
from agentrl_proxy.protocols.messages import COUNT, MESSAGES
from agentrl_proxy.protocols.models import ADAPTER
from agentrl_proxy.protocols.responses import RESPONSES

_TEXT, _INTEGER, _LIST = TEXT.schema, {"type": "integer"}, {"type": "array"}
_OPENAI = "https://platform.openai.com/docs/api-reference"
_ANTHROPIC = "https://docs.anthropic.com/en/api"
_REWARDS: Schema = {  # one, or several by name
    "anyOf": [{"type": "number"}, {"type": "object", "additionalProperties": {"type": "number"}}]
}
_VALUE = replace(ANYTHING, schema=_REWARDS)
_REWARD = Object(["value"], value=_VALUE, name=TEXT, agent=TEXT, response_id=TEXT, explanation=TEXT)


def _answer(**properties: Schema) -> Schema:
    return {"type": "object", "required": [*properties], "properties": properties}


_CHOICE = _answer(
    index=_INTEGER, message=MESSAGE.schema, finish_reason={"enum": ["stop", "length", "tool_calls"]}
)
SCHEMAS: dict[str, Schema] = {
    "ChatCompletionRequest": CHAT.schema,
    "ChatCompletion": _answer(id=_TEXT, model=_TEXT, choices={"type": "array", "items": _CHOICE}),
    "CompletionRequest": COMPLETION.schema,
    "Completion": _answer(id=_TEXT, choices=_LIST),
    "ResponsesRequest": {**RESPONSES.schema, "description": f"{_OPENAI}/responses"},
    "Response": _answer(id=_TEXT, output=_LIST),
    "EmbeddingsRequest": EMBEDDINGS.schema,
    "Embeddings": _answer(data=_LIST),
    "MessagesRequest": {**MESSAGES.schema, "description": f"{_ANTHROPIC}/messages"},
    "CountTokensRequest": {**COUNT.schema, "description": f"{_ANTHROPIC}/messages-count-tokens"},
    "Message": _answer(id=_TEXT, content=_LIST),
    "TokenCount": _answer(input_tokens=_INTEGER),
    "RewardRequest": _REWARD.schema,
    "Reward": _answer(name=_TEXT, value=_REWARDS, key=_TEXT),
    "AdapterRequest": ADAPTER.schema,
    "Adapter": _answer(name=_TEXT, version=_INTEGER),
    "Nothing": {"type": "object"},
    "Spans": {"type": "object", "description": "https://opentelemetry.io/docs/specs/otlp/"},
    "Models": _answer(data=_LIST),
    "Model": _answer(id=_TEXT),
    "Health": _answer(status={"enum": ["ok", "unhealthy"]}, version=_TEXT, boot_id=_TEXT),
    "Error": _answer(error=_answer(message=_TEXT, type=_TEXT)),
}

# path, summary, request (None: GET), answer
_OPERATIONS: tuple[tuple[str, str, str | None, str], ...] = (
    ("/healthz", "Whether it can answer", None, "Health"),
    ("/admin/adapters", "Answer with this adapter version", "AdapterRequest", "Adapter"),
    ("/admin/drop-prefixes", "Free the sampler's prefix cache", "Nothing", "Nothing"),
    ("/rollouts/{rollout_id}/v1/rewards", "Reward the rollout", "RewardRequest", "Reward"),
    ("/v1/models", "List models", None, "Models"),
    ("/v1/models/{model}", "Describe a model", None, "Model"),
    ("/v1/chat/completions", "Complete a chat", "ChatCompletionRequest", "ChatCompletion"),
    ("/v1/completions", "Complete a text", "CompletionRequest", "Completion"),
    ("/v1/responses", "Respond", "ResponsesRequest", "Response"),
    ("/v1/responses/{response_id}", "Return a response", None, "Response"),
    ("/v1/embeddings", "Embed texts", "EmbeddingsRequest", "Embeddings"),
    ("/v1/messages", "Answer", "MessagesRequest", "Message"),
    ("/v1/messages/count_tokens", "Count tokens", "CountTokensRequest", "TokenCount"),
    ("/v1/traces", "Export spans", "Spans", "Spans"),
)


def _content(name: str) -> Schema:
    return {"content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}}


def document(version: str) -> Schema:
    """Return the OpenAPI document. Paths under ``/v1`` exist for each rollout, too."""
    paths: dict[str, Schema] = {}
    for path, summary, request, answer in _OPERATIONS:
        operation: Schema = {
            "summary": summary,
            "responses": {
                "200": {"description": "done", **_content(answer)},
                "default": {"description": "an error", **_content("Error")},
            },
        }
        if request is not None:
            operation["requestBody"] = {"required": True, **_content(request)}
        for prefix in ("", "/rollouts/{rollout_id}") if path.startswith("/v1/") else ("",):
            parameters = [
                {"name": name, "in": "path", "required": True, "schema": _TEXT}
                for name in re.findall(r"\{(\w+)\}", prefix + path)
            ]
            method = "get" if request is None else "post"
            paths[prefix + path] = {"parameters": parameters, method: operation}
    return {
        "openapi": "3.1.0",
        "info": {"title": "agentrl gateway", "version": version},
        "security": [{"key": []}],
        "paths": paths,
        "components": {
            "schemas": SCHEMAS,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }
