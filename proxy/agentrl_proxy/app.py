"""The gateway's app: which route does what, and errors in OpenAI's shape.

Knows routes. Does not know tokens. Handlers read raw bodies and return ready bytes: FastAPI's
parameters, models and BaseHTTPMiddleware would cost more than everything else here together.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Mapping
from typing import Any, Protocol

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from agentrl_proxy import ingest, wire
from agentrl_proxy.asgi import (
    WorkResponse,
    Write,
    internal_error,
    json_response,
    read_body,
)
from agentrl_proxy.attempts import Attempts
from agentrl_proxy.auth import Caller, Credentials, ask
from agentrl_proxy.chat import ChatService, Job
from agentrl_proxy.deps import GatewayDeps, GatewayStats
from agentrl_proxy.errors import ApiError, invalid, unavailable
from agentrl_proxy.openai_types import json_object, parse_chat_request
from agentrl_proxy.other_models import OtherJob, OtherModels, wants_usage
from agentrl_tracer.schemas import AttemptState

log = logging.getLogger("agentrl.proxy")

_SWEEP_S = 30.0


class Gateway:
    """The handlers, and what they share."""

    def __init__(self, deps: GatewayDeps) -> None:
        self.deps = deps
        self.stats = GatewayStats()
        self.attempts = Attempts()
        self.credentials = Credentials(deps.store, deps.operator_key, self.stats)
        self.chat = ChatService(deps, self.attempts, self.stats)
        self.others = OtherModels(deps, self.attempts, self.stats)

    async def healthz(self, request: Request) -> Response:
        sampler = self.deps.sampler
        healthy = sampler.healthy
        return json_response(
            {
                "status": "ok" if healthy else "unhealthy",
                "boot_id": self.deps.boot_id,
                "pid": os.getpid(),
                "adapters": dict(sampler.adapters),
                "in_flight": self.stats.in_flight,
                "gateway": self.stats.as_dict(),
                "sampler": sampler.stats(),
            },
            200 if healthy else 503,
        )

    async def models(self, request: Request) -> Response:
        await self._caller(request)
        names = sorted({*self.deps.models, *self.deps.other_models})
        owner = {"object": "model", "created": 0, "owned_by": "agentrl"}
        return json_response({"object": "list", "data": [{"id": name, **owner} for name in names]})

    async def chat_completions(self, request: Request) -> Response:
        caller = await self._caller(request)
        body = await read_body(request, self.deps.max_body_bytes)
        raw = json_object(body)
        if self.others.has(raw):
            service: _Service = self.others
            chat: Any
            chat, stream, usage = raw, raw.get("stream") is True, wants_usage(raw)
        else:
            service, chat = self.chat, parse_chat_request(raw)
            stream, usage = chat.stream, chat.include_usage
        if request.headers.get("x-stainless-retry-count", "0") != "0":
            work = _Retry(self.chat, service, chat, body, caller, request, include_usage=usage)
            return WorkResponse(work, stream=stream)
        job = await service.accept(chat, body, caller, request.headers)
        return WorkResponse(_Work(service, job), stream=stream)

    async def traces(self, request: Request) -> Response:
        caller = await self._caller(request, may_be_sealed=True)
        body = await read_body(request, self.deps.max_body_bytes)
        return await ingest.traces(
            self.deps.writer, caller, body, request.headers.get("content-type", "")
        )

    async def rewards(self, request: Request) -> Response:
        caller = await self._caller(request, may_be_sealed=True)
        body = await read_body(request, self.deps.max_body_bytes)
        key = request.headers.get("idempotency-key")
        return await ingest.reward(self.deps.writer, caller, body, key)

    async def load_adapter(self, request: Request) -> Response:
        await self.credentials.operator_only(request.headers)
        body = ingest.json_object(await read_body(request, self.deps.max_body_bytes))
        name, version, path = body.get("name"), body.get("version"), body.get("path")
        if not isinstance(name, str) or not name:
            raise invalid("name", "name must be a non-empty string")
        if not isinstance(version, int) or isinstance(version, bool) or version < 0:
            raise invalid("version", "version must be an integer of at least 0")
        if not isinstance(path, str) or not path:
            raise invalid("path", "path must be a non-empty string")
        try:
            await self.deps.sampler.load_adapter(name, version, path)
        except Exception as error:
            log.exception("loading adapter %s@%d failed", name, version)
            text = f"adapter {name}@{version} was not loaded: {type(error).__name__}: {error}"
            raise unavailable(text, "adapter_not_loaded") from error
        return json_response({"name": name, "version": version})

    async def forget_sealed(self, quiet_s: float) -> None:
        """Drops what is remembered of attempts that are over. Nobody tells the gateway."""
        store = self.deps.store
        for attempt_id in self.attempts.quiet(quiet_s):
            if await ask(store, store.attempt_state, attempt_id) is not AttemptState.RUNNING:
                self.attempts.forget(attempt_id)

    async def _caller(self, request: Request, *, may_be_sealed: bool = False) -> Caller:
        rollout_id = request.path_params.get("rollout_id")
        return await self.credentials.caller(
            request.headers, rollout_id, may_be_sealed=may_be_sealed
        )


class _Service(Protocol):
    """What answers a request: our sampler, or somebody else's model."""

    async def accept(
        self, request: Any, body: bytes, caller: Caller, headers: Mapping[str, str], /
    ) -> Any: ...

    async def run(self, job: Any, write: Write | None, /) -> dict[str, Any]: ...


class _Work:
    def __init__(self, service: _Service, job: Job | OtherJob) -> None:
        self._service = service
        self._job = job

    @property
    def keep_alone(self) -> bool:
        return self._job.wanted_by_retry

    async def run(self, write: Write | None) -> dict[str, Any]:
        return await self._service.run(self._job, write)


class _Retry:
    """A marked client retry: an identical earlier request's answer, else a call of its own."""

    def __init__(
        self,
        answers: ChatService,
        service: _Service,
        chat: Any,
        body: bytes,
        caller: Caller,
        request: Request,
        *,
        include_usage: bool,
    ) -> None:
        self._answers = answers
        self._service = service
        self._chat = chat
        self._include_usage = include_usage
        self._body = body
        self._caller = caller
        self._headers = request.headers
        self._job: Job | OtherJob | None = None

    @property
    def keep_alone(self) -> bool:
        return self._job is not None and self._job.wanted_by_retry

    async def run(self, write: Write | None) -> dict[str, Any]:
        service = self._service
        response = await self._answers.earlier_answer(self._body, self._caller)
        if response is None:
            self._job = await service.accept(self._chat, self._body, self._caller, self._headers)
            return await service.run(self._job, write)
        if write is not None:
            for chunk in wire.replayed(response, include_usage=self._include_usage):
                await write(chunk)
        return response


def create_app(deps: GatewayDeps) -> FastAPI:
    """The gateway as an ASGI app. ``app.state.gateway`` is its Gateway."""
    gateway = Gateway(deps)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        # The first reply should not pay for imports and template compilation.
        await asyncio.to_thread(_warm_up, deps)
        sweeper = asyncio.create_task(_sweep(gateway))
        gateway.others.begin()
        yield
        sweeper.cancel()

    app = FastAPI(
        title="agentrl gateway",
        lifespan=lifespan,
        openapi_url=None,  # handlers read raw bodies: a generated schema would be empty
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.gateway = gateway
    route = app.router.add_route
    route("/healthz", gateway.healthz, methods=["GET"])
    route("/admin/adapters", gateway.load_adapter, methods=["POST"])
    for prefix in ("", "/rollouts/{rollout_id}"):
        route(f"{prefix}/v1/models", gateway.models, methods=["GET"])
        route(f"{prefix}/v1/chat/completions", gateway.chat_completions, methods=["POST"])
        route(f"{prefix}/v1/traces", gateway.traces, methods=["POST"])
    route("/rollouts/{rollout_id}/v1/rewards", gateway.rewards, methods=["POST"])
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _any_error)
    return app


async def _sweep(gateway: Gateway) -> None:
    while True:
        await asyncio.sleep(_SWEEP_S)
        try:
            await gateway.forget_sealed(_SWEEP_S)
        except Exception:  # a busy store; the next round will do
            log.warning("could not look for sealed attempts", exc_info=True)


def _warm_up(deps: GatewayDeps) -> None:
    renderer = deps.renderer
    for tools in (False, True):
        parser = renderer.parser(tools=tools)
        parser.feed("<")
        parser.finish()


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return Response(
        error.json(),
        status_code=error.status,
        headers=error.headers,
        media_type="application/json",
    )


async def _http_error(request: Request, error: Exception) -> Response:
    """What the router refuses: unknown paths and methods."""
    assert isinstance(error, HTTPException)
    texts = {
        404: (f"no such path: {request.url.path[:200]}", "not_found"),
        405: (f"{request.method} is not allowed here", "method_not_allowed"),
    }
    message, code = texts.get(error.status_code, (str(error.detail), "http_error"))
    headers = dict(error.headers) if error.headers else None
    return await _api_error(
        request, ApiError(error.status_code, message, code=code, headers=headers)
    )


async def _any_error(request: Request, error: Exception) -> Response:
    # uvicorn logs the traceback; the client is told no detail, which could quote anything.
    return await _api_error(request, internal_error())
