"""Handle the gateway's routes: read the request, find its service, write the answer.

Handlers read raw bodies and return ready bytes: parameters and models of a framework would cost
more than everything else here together.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from hashlib import blake2b
from importlib import metadata
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from agentrl_proxy.dependencies import GatewayDependencies, GatewayStats, ProviderModel
from agentrl_proxy.errors import (
    ApiError,
    invalid,
    model_not_found,
    refused_by_sampler,
    unavailable,
)
from agentrl_proxy.generation.service import ChatService
from agentrl_proxy.protocols import openapi
from agentrl_proxy.protocols.chat import ChatRequest
from agentrl_proxy.protocols.fields import check_body, read_object
from agentrl_proxy.protocols.messages import messages_as_chat
from agentrl_proxy.protocols.models import ADAPTER, model_card, model_list
from agentrl_proxy.protocols.responses import responses_as_chat
from agentrl_proxy.providers.requests import (
    Parts,
    Reader,
    chat_parts,
    completion_parts,
    embedding_parts,
    translated_parts,
)
from agentrl_proxy.providers.service import ProviderRequest, ProviderService
from agentrl_proxy.requests.attempts import AttemptMemories
from agentrl_proxy.requests.auth import Credentials, ask
from agentrl_proxy.requests.lifecycle import ClientRequest
from agentrl_proxy.requests.rate_limits import Admission
from agentrl_proxy.requests.recording import agent_name
from agentrl_proxy.requests.speakers import speaker_of
from agentrl_proxy.requests.stored_responses import StoredResponses, response_of
from agentrl_proxy.sampler import PrefixCache, RefusedError
from agentrl_proxy.server.large_requests import LargeRequests, is_large
from agentrl_proxy.server.request_body import BodyReader
from agentrl_proxy.server.sse import WorkResponse, json_response
from agentrl_proxy.telemetry import otlp_ingest
from agentrl_proxy.telemetry.otlp_export import ExportingSink
from agentrl_tracer.schemas import AttemptRef, AttemptState

log = logging.getLogger("agentrl.proxy")

_MAX_RECORDED_BYTES = 8 * 1024 * 1024  # of several choices: each one's row holds the request
_COUNTED_CONTEXTS = 8  # a prompt is counted up to so many times the context length


class Handlers:
    """The handlers of one gateway, and the parts that they share."""

    def __init__(self, deps: GatewayDependencies) -> None:
        if deps.forward is not None:
            deps = replace(deps, writer=ExportingSink(deps.writer, deps.forward))
        self.deps = deps
        self.version = metadata.version("agentrl-middleware")
        self.stats = GatewayStats()
        self.attempts = AttemptMemories()
        self.credentials = Credentials(deps.store, deps.operator_key, self.stats)
        self.large = LargeRequests()
        self.bodies = BodyReader(deps.max_body_bytes, deps.limits, self.stats, self.large)
        self.admission = Admission(deps, self.stats)
        self.chat = ChatService(deps, self.stats, self.large)
        self.providers = ProviderService(deps, self.stats)

    # --- about the gateway

    async def healthz(self, request: Request) -> Response:
        """Report health and identity to everyone, counters to the operator."""
        sampler = self.deps.sampler
        healthy, sampler_stats = sampler.healthy, sampler.stats()
        report: dict[str, Any] = {
            "status": "ok" if healthy else "unhealthy",
            "version": self.version,
            "boot_id": self.deps.boot_id,
            "recoveries": sampler_stats.get("recoveries", 0),
            "context_length": self.deps.context_length,
        }
        if self.credentials.may_read_stats(request.headers):
            report |= {
                "pid": os.getpid(),
                "adapters": dict(sampler.adapters),
                "in_flight": self.stats.in_flight,
                "gateway": asdict(self.stats),
                "sampler": sampler_stats,
            }
            if self.deps.forward is not None:
                report["forward_otlp"] = self.deps.forward.stats()
        return json_response(report, 200 if healthy else 503)

    async def openapi(self, request: Request) -> Response:
        return json_response(openapi.document(self.version))

    async def models(self, request: Request) -> Response:
        await self.credentials.caller(request.headers, request.path_params.get("rollout_id"))
        names = sorted({*self.deps.models, *self.deps.provider_models})
        return json_response(model_list(names, anthropic=speaks_anthropic(request)))

    async def model(self, request: Request) -> Response:
        """Describe a listed model. ``accept_any_model`` lists no further names."""
        await self.credentials.caller(request.headers, request.path_params.get("rollout_id"))
        name = request.path_params["model"]
        if name not in self.deps.models and name not in self.deps.provider_models:
            raise model_not_found(name)
        return json_response(model_card(name, anthropic=speaks_anthropic(request)))

    # --- model requests

    async def chat_completions(self, request: Request) -> Response:
        return await self._answer(request, chat_parts)

    async def completions(self, request: Request) -> Response:
        return await self._answer(request, partial(completion_parts, self.deps))

    async def responses(self, request: Request) -> Response:
        as_chat = partial(responses_as_chat, leave_out=self.deps.leave_out_tools)
        read = partial(translated_parts, as_chat)
        return await self._answer(request, read, may_refer=True)

    async def response(self, request: Request) -> Response:
        """Return a stored response, from its record."""
        if request.query_params.get("stream") == "true":
            raise invalid("stream", "a stored response is not streamed; leave stream out")
        headers, params = request.headers, request.path_params
        attempt = await self.credentials.caller(headers, params.get("rollout_id"))
        known = StoredResponses(self.deps.store, attempt, headers)
        return json_response(response_of(await known.get(params["response_id"])))

    async def messages(self, request: Request) -> Response:
        as_chat = partial(messages_as_chat, leave_out=self.deps.leave_out_tools)
        return await self._answer(request, partial(translated_parts, as_chat))

    async def embeddings(self, request: Request) -> Response:
        return await self._answer(request, embedding_parts)

    async def count_tokens(self, request: Request) -> Response:
        """Count the prompt tokens of a Messages request. Nothing is sampled."""
        attempt, headers, body = await self._received(request)
        as_chat = partial(messages_as_chat, counted=True, leave_out=self.deps.leave_out_tools)
        large = is_large(body)
        raw, _, _, [asked] = await self._read(body, large, partial(translated_parts, as_chat))
        if isinstance(asked, ProviderRequest):
            return json_response({"input_tokens": await self.providers.count(asked)})
        agent = agent_name(headers) or speaker_of(self.deps.speakers, asked, headers, raw["model"])
        adapter = self.chat.resolve_model(raw["model"], agent)
        memory = None if attempt is None else self.attempts.of(attempt)
        render = partial(self.chat.render, longest=_COUNTED_CONTEXTS)
        prompt = await self.large.run(large, render, asked, memory, adapter)
        return json_response({"input_tokens": len(prompt.ids)})

    async def _answer(self, request: Request, read: Reader, *, may_refer: bool = False) -> Response:
        """Answer with our own model or the provider's that the request names.

        Args:
            may_refer: whether the request may name earlier responses by their ids.
        """
        attempt, headers, body = await self._received(request)
        known = StoredResponses(self.deps.store, attempt, headers) if may_refer else None
        large = is_large(body)
        raw, digest, provider, parts = await self._read(body, large, read, known)
        work = ClientRequest(
            self.admission,
            self.chat if provider is None else self.providers,
            parts,
            len(parts) * parts[0].n if provider is None else 0,
            raw,
            len(body),
            digest,
            headers,
            None if attempt is None else self.attempts.of(attempt),
            large,
        )
        return WorkResponse(work, stream=bool(raw.get("stream")))

    async def _read(
        self, body: bytes, large: bool, read: Reader, known: StoredResponses | None = None
    ) -> tuple[dict[str, Any], bytes, ProviderModel | None, Parts]:
        """Check a body. Return it parsed, its digest, the provider's model that it names, and its
        parts.

        Args:
            known: the responses that it may name.
        """
        earlier = None
        raw, digest = await self.large.run(large, _read_object, body)
        provider = self.providers.model_of(raw)
        if provider is not None:
            await self.providers.ready()
        if known is not None:
            raw, earlier = await known.resolved(raw)
        parts = await self.large.run(large, read, raw, provider)
        if isinstance(parts[0], ChatRequest):
            parts[0].earlier = earlier
        choices = len(parts) * parts[0].n
        if choices > 1 and len(body) * choices > _MAX_RECORDED_BYTES:
            message = (
                f"the body times its choices is more than {_MAX_RECORDED_BYTES} bytes, which would "
                "be recorded; ask for fewer choices, or send several requests"
            )
            raise ApiError(413, message, param="n", code="body_too_large")
        return raw, digest, provider, parts

    async def _received(
        self, request: Request, *, may_be_sealed: bool = False
    ) -> tuple[AttemptRef | None, Mapping[str, str], bytes]:
        """Check a request's key and read its body. Return its attempt, headers and body."""
        # A look-up in starlette's headers goes through all of them; the first of a name counts.
        pairs = reversed(request.scope["headers"])
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in pairs}
        rollout_id = request.path_params.get("rollout_id")
        attempt = await self.credentials.caller(headers, rollout_id, may_be_sealed=may_be_sealed)
        return attempt, headers, await self.bodies.read(request.receive, headers)

    # --- spans, rewards, adapters

    async def traces(self, request: Request) -> Response:
        attempt, headers, body = await self._received(request, may_be_sealed=True)
        writer, store = self.deps.writer, self.deps.store
        response, given_up = await otlp_ingest.traces(writer, self.large, attempt, body, headers)
        if attempt is not None and given_up:
            self.attempts.of(attempt).given_up.update(given_up)
            await asyncio.to_thread(store.mark_undelivered, attempt.attempt_id, given_up)
        return response

    async def rewards(self, request: Request) -> Response:
        attempt, headers, body = await self._received(request, may_be_sealed=True)
        return await otlp_ingest.reward(self.deps.writer, attempt, body, headers)

    async def load_adapter(self, request: Request) -> Response:
        await self.credentials.operator_only(request.headers)
        body = read_object(await self.bodies.read(request.receive, request.headers))
        check_body(ADAPTER, body)
        name, version, path = body["name"], body["version"], body["path"]
        try:
            await self.deps.sampler.load_adapter(name, version, path)
        except RefusedError as error:  # 400 is final; on 503 the trainer tries again
            log.warning("adapter %s@%d is not loaded: %s", name, version, error)
            raise refused_by_sampler(error.code, str(error)) from error
        except Exception as error:
            log.exception("loading adapter %s@%d failed", name, version)
            text = f"adapter {name}@{version} was not loaded: {type(error).__name__}: {error}"
            raise unavailable(text, "adapter_not_loaded") from error
        return json_response({"name": name, "version": version})

    async def drop_prefixes(self, request: Request) -> Response:
        await self.credentials.operator_only(request.headers)
        if isinstance(sampler := self.deps.sampler, PrefixCache):
            await sampler.drop_prefixes()
        return json_response({})

    async def forget_sealed(self) -> None:
        """Drop the memory of attempts that the store says are over."""
        store = self.deps.store
        for attempt_id in self.attempts.quiet():
            if await ask(store, store.attempt_state, attempt_id) is not AttemptState.RUNNING:
                self.attempts.pop(attempt_id, None)
            await asyncio.sleep(0)  # there may be thousands


def _read_object(body: bytes) -> tuple[dict[str, Any], bytes]:
    return read_object(body), blake2b(body, digest_size=16).digest()


def speaks_anthropic(request: Request) -> bool:
    """Return whether the client uses Anthropic's API; on shared paths its version header tells."""
    path = request.url.path
    return "/v1/messages" in path or (
        "/v1/models" in path and "anthropic-version" in request.headers
    )
