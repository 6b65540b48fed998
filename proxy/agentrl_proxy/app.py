"""The gateway's app: which route does what, and errors in OpenAI's shape.

Knows routes. Does not know tokens. Handlers read raw bodies and return ready bytes: FastAPI's
parameters, models and BaseHTTPMiddleware would cost more than everything else here together.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import orjson
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from agentrl_proxy.dependencies import GatewayDependencies
from agentrl_proxy.errors import (
    ApiError,
    invalid,
    model_not_found,
    refused_by_sampler,
    unavailable,
)
from agentrl_proxy.generation.completions import text_prompts
from agentrl_proxy.generation.service import ChatService
from agentrl_proxy.protocols import openapi, translation
from agentrl_proxy.protocols.chat import ChatRequest, chat_request
from agentrl_proxy.protocols.chat_objects import Dialect
from agentrl_proxy.protocols.completions import completion_request
from agentrl_proxy.protocols.fields import read_object
from agentrl_proxy.protocols.messages import count_request, messages_request
from agentrl_proxy.protocols.messages_events import anthropic_error
from agentrl_proxy.protocols.models import model_card, model_list
from agentrl_proxy.protocols.responses import responses_request
from agentrl_proxy.providers.requests import (
    ProviderCountWork,
    chat_elsewhere,
    of_completion,
    of_message,
    of_response,
)
from agentrl_proxy.providers.service import ProviderRequest, ProviderService
from agentrl_proxy.requests.attempts import AttemptMemories
from agentrl_proxy.requests.auth import Caller, Credentials, ask
from agentrl_proxy.requests.client_retries import ClientRetries, identify
from agentrl_proxy.requests.lifecycle import ClientRequest, RequestLifecycle, Service
from agentrl_proxy.requests.rate_limits import Admission
from agentrl_proxy.requests.recording import trace_context
from agentrl_proxy.sampler import RefusedError
from agentrl_proxy.server.request_body import BodyReader
from agentrl_proxy.server.sse import WorkResponse, internal_error, json_response
from agentrl_proxy.stats import GatewayStats
from agentrl_proxy.telemetry import otlp_ingest as ingest
from agentrl_proxy.telemetry.otlp_export import ExportingSink
from agentrl_tracer.schemas import AttemptState

log = logging.getLogger("agentrl.proxy")

Handler = Callable[[Request], Awaitable[Response]]

_SWEEP_S = 2.0


class Gateway:
    """The handlers, and what they share."""

    def __init__(self, deps: GatewayDependencies) -> None:
        self.forward = deps.forward
        if self.forward is not None:
            deps = replace(deps, writer=ExportingSink(deps.writer, self.forward))
        self.deps = deps
        self.stats = GatewayStats()
        self.attempts = AttemptMemories()
        self.credentials = Credentials(deps.store, deps.operator_key, self.stats)
        admission = Admission(deps, self.stats)
        self.chat = ChatService(deps, self.attempts, self.stats, admission)
        self.others = ProviderService(deps, self.attempts, self.stats, admission)
        retries = ClientRetries(deps.store, self.attempts)
        self.lifecycle = RequestLifecycle(retries, self.attempts, self.stats)
        self.bodies = BodyReader(deps.max_body_bytes, deps.limits, self._count_overload)

    def _count_overload(self) -> None:
        self.stats.overloaded += 1

    async def healthz(self, request: Request) -> Response:
        """Whether it can answer, and which one it is: for anybody. The rest is the operator's."""
        sampler = self.deps.sampler
        healthy, of_sampler = sampler.healthy, sampler.stats()
        said: dict[str, Any] = {
            "status": "ok" if healthy else "unhealthy",
            "version": request.app.version,
            "boot_id": self.deps.boot_id,
            "recoveries": of_sampler.get("recoveries", 0),
        }
        if self.credentials.may_look(request.headers):
            said |= {
                "pid": os.getpid(),
                "adapters": dict(sampler.adapters),
                "in_flight": self.stats.in_flight,
                "gateway": self.stats.as_dict(),
                "sampler": of_sampler,
            }
            if self.forward is not None:
                said["forward_otlp"] = self.forward.stats()
        return json_response(said, 200 if healthy else 503)

    async def description(self, request: Request) -> Response:
        return json_response(openapi.document(request.app.version))

    async def models(self, request: Request) -> Response:
        await self._caller(request)
        names = sorted({*self.deps.models, *self.deps.provider_models})
        return json_response(model_list(names, anthropic=_speaks_anthropic(request)))

    async def model(self, request: Request) -> Response:
        """One of those that are listed. Other names may be answered too (``accept_any_model``), by
        models that are."""
        await self._caller(request)
        name = request.path_params["model"]
        if name not in self.deps.models and name not in self.deps.provider_models:
            raise model_not_found(name)
        return json_response(model_card(name, anthropic=_speaks_anthropic(request)))

    async def chat_completions(self, request: Request) -> Response:
        caller, body, raw = await self._received(request)
        elsewhere = self.others.named(raw)
        asked = chat_request(raw) if elsewhere is None else chat_elsewhere(raw)
        return await self._reply(asked, body, caller, request.headers)

    async def responses(self, request: Request) -> Response:
        caller, body, raw = await self._received(request)
        await translation.load()
        elsewhere = self.others.named(raw)
        asked = responses_request(raw) if elsewhere is None else of_response(raw, elsewhere)
        return await self._reply(asked, body, caller, request.headers)

    async def messages(self, request: Request) -> Response:
        caller, body, raw = await self._received(request)
        await translation.load()
        elsewhere = self.others.named(raw)
        asked = messages_request(raw) if elsewhere is None else of_message(raw, elsewhere)
        return await self._reply(asked, body, caller, request.headers)

    async def count_tokens(self, request: Request) -> Response:
        """How long the prompt of such a Messages request would be. Nothing is sampled."""
        caller, _, raw = await self._received(request)
        await translation.load()
        elsewhere = self.others.named(raw)
        if elsewhere is not None:
            asked = of_message(raw, elsewhere, counted=True)
            return WorkResponse(ProviderCountWork(self.others, asked, elsewhere), stream=False)
        prompt = self.chat.render(count_request(raw), caller, request.headers)
        return json_response({"input_tokens": len(prompt.ids)})

    async def completions(self, request: Request) -> Response:
        caller, body, raw = await self._received(request)
        elsewhere = self.others.named(raw)
        if elsewhere is None:
            asked = completion_request(raw, self.deps.renderer)
            parts, n = text_prompts(asked, self.deps.context_length), asked.common.n
            return self._answer(
                self.chat, parts, asked.dialect, raw, body, caller, request.headers,
                n=n, stream=asked.stream,
            )  # fmt: skip
        prompts, dialect = of_completion(raw, elsewhere)
        return self._answer(
            self.others, prompts, dialect, raw, body, caller, request.headers,
            n=prompts[0].n, stream=prompts[0].stream,
        )  # fmt: skip

    async def _received(self, request: Request) -> tuple[Caller, bytes, dict[str, Any]]:
        caller = await self._caller(request)
        body = await self.bodies.read(request)
        return caller, body, read_object(body)

    async def _reply(
        self,
        asked: ChatRequest | ProviderRequest,
        body: bytes,
        caller: Caller,
        headers: Mapping[str, str],
    ) -> Response:
        service = self.chat if isinstance(asked, ChatRequest) else self.others
        return self._answer(
            service, [asked], asked.dialect, asked.raw, body, caller, headers,
            n=asked.n, stream=asked.stream,
        )  # fmt: skip

    def _answer(
        self,
        service: Service,
        parts: Sequence[Any],
        dialect: Dialect,
        raw: dict[str, Any],
        body: bytes,
        caller: Caller,
        headers: Mapping[str, str],
        *,
        n: int,
        stream: bool,
    ) -> Response:
        identity = identify(raw, body, dialect, headers, len(parts), n)
        work = ClientRequest(self.lifecycle, service, parts, identity, caller, headers)
        return WorkResponse(work, stream=stream)

    async def traces(self, request: Request) -> Response:
        caller = await self._caller(request, may_be_sealed=True)
        body = await self.bodies.read(request)
        return await ingest.traces(
            self.deps.writer, caller, body, request.headers.get("content-type", "")
        )

    async def rewards(self, request: Request) -> Response:
        caller = await self._caller(request, may_be_sealed=True)
        body = await self.bodies.read(request)
        key = request.headers.get("idempotency-key")
        _, span_id = trace_context(request.headers)
        return await ingest.reward(self.deps.writer, caller, body, key, span_id)

    async def load_adapter(self, request: Request) -> Response:
        await self.credentials.operator_only(request.headers)
        body = read_object(await self.bodies.read(request))
        name, version, path = body.get("name"), body.get("version"), body.get("path")
        if not isinstance(name, str) or not name or "\0" in name:
            raise invalid("name", "name must be a non-empty string without NUL characters")
        if not isinstance(version, int) or isinstance(version, bool):
            raise invalid("version", "version must be an integer")
        if not 0 <= version < 2**31:  # the store's integers
            raise invalid("version", "version must be an integer from 0 to 2147483647")
        if not isinstance(path, str) or not path:
            raise invalid("path", "path must be a non-empty string")
        try:
            await self.deps.sampler.load_adapter(name, version, path)
        except RefusedError as error:  # 400: for good; 503: not yet, and the trainer asks again
            log.warning("adapter %s@%d is not loaded: %s", name, version, error)
            raise refused_by_sampler(error.code, str(error)) from error
        except Exception as error:
            log.exception("loading adapter %s@%d failed", name, version)
            text = f"adapter {name}@{version} was not loaded: {type(error).__name__}: {error}"
            raise unavailable(text, "adapter_not_loaded") from error
        return json_response({"name": name, "version": version})

    async def forget_sealed(self) -> None:
        """Drops what is remembered of attempts that are over. Nobody tells the gateway."""
        store = self.deps.store
        for attempt_id in self.attempts.quiet():
            if await ask(store, store.attempt_state, attempt_id) is not AttemptState.RUNNING:
                self.attempts.forget(attempt_id)
            await asyncio.sleep(0)  # there may be thousands

    async def _caller(self, request: Request, *, may_be_sealed: bool = False) -> Caller:
        rollout_id = request.path_params.get("rollout_id")
        return await self.credentials.caller(
            request.headers, rollout_id, may_be_sealed=may_be_sealed
        )


class GatewayApp(FastAPI):
    """FastAPI, with a short cut past its middlewares and its search through all routes, which cost
    what agents ask a tenth of its CPU. ``direct`` has no effect but that.
    """

    def direct(self, path: str, handler: Handler) -> None:
        """POSTs to ``path``, with or without ``/rollouts/<id>`` before it, go to ``handler``."""
        self._direct[path] = handler

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._direct: dict[str, Handler] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handler = self._find(scope)
        if handler is None:
            await super().__call__(scope, receive, send)
            return
        started = False

        async def sending(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        scope["app"] = self
        request = Request(scope, receive)
        try:
            response = await handler(request)
            await response(scope, receive, sending)
        except ApiError as error:
            refusal = await _api_error(request, error)
            await refusal(scope, receive, send)
        except Exception as error:
            if not started:
                refusal = await _any_error(request, error)
                await refusal(scope, receive, send)
            raise  # for the server's log

    def _find(self, scope: Scope) -> Handler | None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope.get("root_path"):
            return None
        path: str = scope["path"]
        scope["path_params"] = {}
        if path.startswith("/rollouts/"):
            rollout_id, slash, path = path[len("/rollouts/") :].partition("/")
            if not rollout_id:
                return None
            scope["path_params"] = {"rollout_id": rollout_id}
            path = slash + path
        return self._direct.get(path)


def create_app(deps: GatewayDependencies) -> FastAPI:
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
        if gateway.forward is not None:
            await asyncio.to_thread(gateway.forward.close)

    app = GatewayApp(
        title="agentrl gateway",
        version=version("agentrl"),
        lifespan=lifespan,
        openapi_url=None,  # handlers read raw bodies: a generated one would be empty
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.gateway = gateway
    route = app.router.add_route
    route("/healthz", gateway.healthz, methods=["GET"])
    route("/openapi.json", gateway.description, methods=["GET"])
    route("/admin/adapters", gateway.load_adapter, methods=["POST"])
    for prefix in ("", "/rollouts/{rollout_id}"):
        route(f"{prefix}/v1/models", gateway.models, methods=["GET"])
        route(f"{prefix}/v1/models/{{model:path}}", gateway.model, methods=["GET"])
        route(f"{prefix}/v1/chat/completions", gateway.chat_completions, methods=["POST"])
        route(f"{prefix}/v1/completions", gateway.completions, methods=["POST"])
        route(f"{prefix}/v1/responses", gateway.responses, methods=["POST"])
        route(f"{prefix}/v1/messages", gateway.messages, methods=["POST"])
        route(f"{prefix}/v1/messages/count_tokens", gateway.count_tokens, methods=["POST"])
        route(f"{prefix}/v1/traces", gateway.traces, methods=["POST"])
    route("/rollouts/{rollout_id}/v1/rewards", gateway.rewards, methods=["POST"])
    app.direct("/v1/chat/completions", gateway.chat_completions)
    app.direct("/v1/responses", gateway.responses)
    app.direct("/v1/messages", gateway.messages)
    app.direct("/v1/traces", gateway.traces)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _any_error)
    return app


async def _sweep(gateway: Gateway) -> None:
    while True:
        await asyncio.sleep(_SWEEP_S)
        try:
            await gateway.forget_sealed()
        except Exception:  # a busy store; the next round will do
            log.warning("could not look for sealed attempts", exc_info=True)


def _warm_up(deps: GatewayDependencies) -> None:
    renderer = deps.renderer
    for tools in (False, True):
        parser = renderer.parser(tools=tools)
        parser.feed("<")
        parser.finish()


def _speaks_anthropic(request: Request) -> bool:
    """Of what both APIs have, Anthropic's clients name the version of theirs."""
    path = request.url.path
    return "/v1/messages" in path or (
        "/v1/models" in path and "anthropic-version" in request.headers
    )


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    body = error.json()
    if _speaks_anthropic(request):
        body = orjson.dumps(anthropic_error(error))
    return Response(
        body,
        status_code=error.status,
        headers=error.headers,
        media_type="application/json",
    )


async def _http_error(request: Request, error: Exception) -> Response:
    """What the router refuses: unknown paths and methods."""
    assert isinstance(error, HTTPException)
    texts = {
        404: (f"no such path: {request.scope['path'][:200]}", "not_found"),
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
