"""Check the body of ``/v1/embeddings``, and say how to get a model that answers it.

Knows OpenAI's fields. Only models of other servers embed.
"""

from __future__ import annotations

import json
from typing import Any

from agentrl_proxy.errors import ApiError
from agentrl_proxy.protocols.chat_objects import ChatDialect
from agentrl_proxy.protocols.fields import (
    NAME,
    NONEMPTY,
    TEXT,
    Array,
    Either,
    Object,
    Value,
    integer,
    is_integer,
    one_of,
)

_INPUT = Value(  # a text, or the ids of one
    lambda v: (
        isinstance(v, str) or is_integer(v) or (isinstance(v, list) and all(map(is_integer, v)))
    ),
    "a text, a token id or a list of token ids",
    {"anyOf": [TEXT.schema, {"type": "integer"}, {"type": "array", "items": {"type": "integer"}}]},
)
EMBEDDINGS = Object(
    ["model", "input"],
    model=NAME,
    input=Either("a text or a non-empty list", str=NONEMPTY, list=Array(_INPUT, minimum=1)),
    dimensions=integer(1),
    encoding_format=one_of("float", "base64"),
    user=TEXT,
)


_USAGE = ("prompt_tokens", "total_tokens")


class EmbeddingDialect(ChatDialect):
    """Writes the provider's answer as it is."""

    id_prefix = "embd_"

    def whole(self, response: dict[str, Any]) -> dict[str, Any]:
        usage = {name: response["usage"].get(name, 0) for name in _USAGE}
        data, model = response["data"], response["model"]
        return {"object": "list", "data": data, "model": model, "usage": usage}


def no_embeddings(model: str) -> ApiError:
    table = f'[models.{json.dumps(model[:100])}] with model = "openai/{model[:100]}"'
    message = (
        f"the model {model[:100]!r} makes no embeddings here; name one that does in the "
        f"configuration: {table}, or that of another provider"
    )
    return ApiError(404, message, param="model", code="model_not_found")
