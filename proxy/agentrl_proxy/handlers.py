"""Handle the gateway's routes: read the request, find its service, write the answer.

Handlers read raw bodies and return ready bytes: parameters and models of a framework would cost
more than everything else here together.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from agentrl_proxy.dependencies import GatewayDependencies, ProviderModel
from agentrl_proxy.errors import model_not_found, refused_by_sampler, unavailable
from agentrl_proxy.generation.service import ChatService
from agentrl_proxy.protocols import openapi, translation
from agentrl_proxy.protocols.chat import ChatRequest, chat_request, translated_request
from agentrl_proxy.protocols.completions import completion_requests
from agentrl_proxy.protocols.fields import check_body, read_object
from agentrl_proxy.protocols.messages import messages_as_chat
from agentrl_proxy.protocols.models import ADAPTER, model_card, model_list
from agentrl_proxy.protocols.responses import responses_as_chat
from agentrl_proxy.providers.requests import (
    provider_chat_request,
    provider_completion_requests,
    provider_message_request,
    provider_response_request,
)
from agentrl_proxy.providers.service import ProviderRequest, ProviderService
from agentrl_proxy.requests.attempts import AttemptMemories
from agentrl_proxy.requests.auth import Credentials, ask
from agentrl_proxy.requests.client_retries import ClientRetries, identify
from agentrl_proxy.requests.lifecycle import ClientRequest, Service
from agentrl_proxy.requests.rate_limits import Admission
from agentrl_proxy.sampler import RefusedError
from agentrl_proxy.server.request_body import BodyReader
from agentrl_proxy.server.sse import WorkResponse, json_response
from agentrl_proxy.stats import GatewayStats
from agentrl_proxy.telemetry import otlp_ingest
from agentrl_proxy.telemetry.otlp_export import ExportingSink
from agentrl_tracer.schemas import AttemptRef, AttemptState

log = logging.getLogger("agentrl.proxy")


@dataclass(frozen=True, slots=True)
class _Received:
    """A model request whose caller is known and whose body is a JSON object."""

    attempt: AttemptRef | None
    body: bytes
    raw: dict[str, Any]
    headers: Mapping[str, str]
    provider: ProviderModel | None  # that it names


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
        self.bodies = BodyReader(deps.max_body_bytes, deps.limits, self._count_overload)
        admission = Admission(deps, self.stats)
        self.chat = ChatService(deps, self.attempts, self.stats, admission)
        self.providers = ProviderService(deps, self.attempts, self.stats, admission)
        self.retries = ClientRetries(deps.store, self.attempts)

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
        }
        if self.credentials.may_read_stats(request.headers):
            report |= {
                "pid": os.getpid(),
                "adapters": dict(sampler.adapters),
                "in_flight": self.stats.in_flight,
                "gateway": self.stats.as_dict(),
                "sampler": sampler_stats,
            }
            if self.deps.forward is not None:
                report["forward_otlp"] = self.deps.forward.stats()
        return json_response(report, 200 if healthy else 503)

    async def openapi(self, request: Request) -> Response:
        return json_response(openapi.document(self.version))

    async def models(self, request: Request) -> Response:
        await self._caller(request)
        names = sorted({*self.deps.models, *self.deps.provider_models})
        return json_response(model_list(names, anthropic=speaks_anthropic(request)))

    async def model(self, request: Request) -> Response:
        """Describe a listed model. ``accept_any_model`` lists no further names."""
        await self._caller(request)
        name = request.path_params["model"]
        if name not in self.deps.models and name not in self.deps.provider_models:
            raise model_not_found(name)
        return json_response(model_card(name, anthropic=speaks_anthropic(request)))

    # --- model requests

    async def chat_completions(self, request: Request) -> Response:
        received = await self._received(request)
        return self._answer(received, chat_request, lambda raw, _: provider_chat_request(raw))

    async def completions(self, request: Request) -> Response:
        received, deps = await self._received(request), self.deps
        return self._answer(
            received,
            lambda raw: completion_requests(raw, deps.renderer, deps.context_length),
            provider_completion_requests,
        )

    async def responses(self, request: Request) -> Response:
        received = await self._received(request, translated=True)
        ours = partial(translated_request, responses_as_chat)
        return self._answer(received, ours, provider_response_request)

    async def messages(self, request: Request) -> Response:
        received = await self._received(request, translated=True)
        ours = partial(translated_request, messages_as_chat)
        return self._answer(received, ours, provider_message_request)

    async def count_tokens(self, request: Request) -> Response:
        """Count the prompt tokens of a Messages request. Nothing is sampled."""
        received = await self._received(request, translated=True)
        raw, provider = received.raw, received.provider
        if provider is not None:
            asked = provider_message_request(raw, provider, counted=True)
            return json_response({"input_tokens": await self.providers.count(asked)})
        counted = translated_request(partial(messages_as_chat, counted=True), raw)
        adapter = self.chat.resolve_model(counted.model, received.headers)
        prompt = self.chat.render(counted, received.attempt, adapter)
        return json_response({"input_tokens": len(prompt.ids)})

    async def _received(self, request: Request, *, translated: bool = False) -> _Received:
        """Check a model request's key and read its body.

        Args:
            translated: whether LiteLLM is needed to read its fields.
        """
        attempt = await self._caller(request)
        body = await self.bodies.read(request)
        raw = read_object(body)
        if translated:
            await translation.load()
        return _Received(attempt, body, raw, request.headers, self.providers.model_of(raw))

    def _answer(
        self,
        received: _Received,
        ours: Callable[[dict[str, Any]], ChatRequest | list[ChatRequest]],
        providers: Callable[
            [dict[str, Any], ProviderModel], ProviderRequest | list[ProviderRequest]
        ],
    ) -> Response:
        """Answer with our own model or the provider's that the request names.

        Args:
            ours, providers: check the request; a text completion's makes one for each prompt.
        """
        raw, headers, provider = received.raw, received.headers, received.provider
        asked = ours(raw) if provider is None else providers(raw, provider)
        service: Service = self.chat if provider is None else self.providers
        parts = asked if isinstance(asked, list) else [asked]
        dialect, n = parts[0].dialect, parts[0].n
        tracked = identify(raw, received.body, dialect, headers, len(parts), n)
        work = ClientRequest(
            self.retries, self.stats, service, parts, tracked, received.attempt, headers
        )
        return WorkResponse(work, stream=bool(raw.get("stream")))

    # --- spans, rewards, adapters

    async def traces(self, request: Request) -> Response:
        attempt = await self._caller(request, may_be_sealed=True)
        body = await self.bodies.read(request)
        content_type = request.headers.get("content-type", "")
        return await otlp_ingest.traces(self.deps.writer, attempt, body, content_type)

    async def rewards(self, request: Request) -> Response:
        attempt = await self._caller(request, may_be_sealed=True)
        body = await self.bodies.read(request)
        return await otlp_ingest.reward(self.deps.writer, attempt, body, request.headers)

    async def load_adapter(self, request: Request) -> Response:
        await self.credentials.operator_only(request.headers)
        body = read_object(await self.bodies.read(request))
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

    # --- inside

    async def forget_sealed(self) -> None:
        """Drop the memory of attempts that the store says are over."""
        store = self.deps.store
        for attempt_id in self.attempts.quiet():
            if await ask(store, store.attempt_state, attempt_id) is not AttemptState.RUNNING:
                self.attempts.forget(attempt_id)
            await asyncio.sleep(0)  # there may be thousands

    async def _caller(self, request: Request, *, may_be_sealed: bool = False) -> AttemptRef | None:
        rollout_id = request.path_params.get("rollout_id")
        return await self.credentials.caller(
            request.headers, rollout_id, may_be_sealed=may_be_sealed
        )

    def _count_overload(self) -> None:
        self.stats.overloaded += 1


def speaks_anthropic(request: Request) -> bool:
    """Return whether the client uses Anthropic's API; on shared paths its version header tells."""
    path = request.url.path
    return "/v1/messages" in path or (
        "/v1/models" in path and "anthropic-version" in request.headers
    )
