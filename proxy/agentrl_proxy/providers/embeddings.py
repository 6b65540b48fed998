"""Forward requests for embeddings to providers' models through LiteLLM, and record them.

A call's record has its request and usage; the vectors, which may be megabytes, are left out. So a
client's retry asks the provider again.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from typing import Any

from agentrl_proxy.errors import ApiError
from agentrl_proxy.protocols.embeddings import EmbeddingDialect
from agentrl_proxy.providers.service import ProviderCall, ProviderRequest, ProviderService
from agentrl_proxy.requests.lifecycle import ClientRequest
from agentrl_proxy.requests.recording import latest_state, open_calls
from agentrl_proxy.server.sse import Write
from agentrl_tracer.schemas import AttemptState, CallState, SkipReason

log = logging.getLogger("agentrl.proxy")

_FIELDS = ("input", "dimensions", "encoding_format", "user")


def embedding_request(raw: dict[str, Any]) -> ProviderRequest:
    return ProviderRequest(raw, raw, EmbeddingDialect())


@dataclass(eq=False, repr=False)
class EmbeddingService:
    """The Service (requests/lifecycle.py) of embeddings."""

    providers: ProviderService

    async def accept(self, request: ProviderRequest, client: ClientRequest) -> ProviderCall:
        _, seq = await client.take_turn(1, 0)
        fields = {name: request.raw[name] for name in _FIELDS if request.raw.get(name) is not None}
        given = fields["input"]
        params = {"embeddings": 1 if isinstance(given, str) else len(given)}
        reason = SkipReason.NOT_TRAINABLE_MODEL
        rows = open_calls(client, request, seq, params, skip_reason=reason)
        self.providers.stats.accepted += 1
        self.providers.stats.other_models += 1
        return ProviderCall(client, request, fields, rows, set())

    async def generate(self, call: ProviderCall, write: Write | None) -> dict[str, Any]:
        said, cost = await self.providers.embed(call)
        usage = said.get("usage") or {}
        usage = {name: usage.get(name) or 0 for name in ("prompt_tokens", "total_tokens")}
        call.params = {"usage": usage} if usage["total_tokens"] else call.params
        if cost is not None:
            call.params["cost"] = cost
        memory = call.client.memory
        if memory is not None and memory.spent is not None:
            memory.spent.tokens += usage["total_tokens"]
        answer = {"object": "list", "data": said["data"], "usage": usage}
        return answer | {"id": call.client.heading.id, "model": call.request.name}

    async def record(
        self, call: ProviderCall, state: CallState, response: dict[str, Any] | None = None
    ) -> AttemptState | None:
        rows = [
            replace(
                row,
                state=state,
                error=call.error or None,
                params={**row.params, **call.params},
                ended_at=time.time(),
            )
            for row in call.rows
        ]
        return await latest_state([self.providers.deps.writer.finish(row) for row in rows])

    def answered(self, call: ProviderCall, response: dict[str, Any]) -> None: ...

    def last_chunks(self, call: ProviderCall, response: dict[str, Any]) -> list[bytes]:
        raise ApiError(400, "embeddings are not streamed")  # the handler asks for no stream
