"""Build the gateway's ASGI app: its routes, and errors in the client's format."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from agentrl_proxy.dependencies import GatewayDependencies
from agentrl_proxy.errors import ApiError, internal_error, unavailable
from agentrl_proxy.handlers import Handlers, speaks_anthropic
from agentrl_proxy.protocols.messages import anthropic_error
from agentrl_proxy.rendering.renderer import Renderer
from agentrl_proxy.server.sse import json_response
from agentrl_tracer.store.faults import unexpected

log = logging.getLogger("agentrl.proxy")

_Handler = Callable[[Request], Awaitable[Response]]
_Routes = dict[str, tuple[str, Callable[[Handlers, Request], Awaitable[Response]]]]

_SWEEP_S = 2.0
_HINTS = {  # what to do instead, by a part of the path
    "/v1/conversations": "continue with previous_response_id, or send the whole conversation as "
    "`input` with store: false",
    "/v1/responses/": "a response is part of the run's record; send store: false to keep one from "
    "being found by its id",
}
# The method and handler of each path.
_MODEL_ROUTES: _Routes = {
    "/v1/models": ("GET", Handlers.models),
    "/v1/models/{model:path}": ("GET", Handlers.model),
    "/v1/chat/completions": ("POST", Handlers.chat_completions),
    "/v1/completions": ("POST", Handlers.completions),
    "/v1/responses": ("POST", Handlers.responses),
    "/v1/responses/{response_id}": ("GET", Handlers.response),
    "/v1/embeddings": ("POST", Handlers.embeddings),
    "/v1/messages": ("POST", Handlers.messages),
    "/v1/messages/count_tokens": ("POST", Handlers.count_tokens),
    "/v1/traces": ("POST", Handlers.traces),
}
ROUTES: _Routes = {
    "/healthz": ("GET", Handlers.healthz),
    "/openapi.json": ("GET", Handlers.openapi),
    "/admin/adapters": ("POST", Handlers.load_adapter),
    "/admin/drop-prefixes": ("POST", Handlers.drop_prefixes),
    "/rollouts/{rollout_id}/v1/rewards": ("POST", Handlers.rewards),
    **_MODEL_ROUTES,
    **{f"/rollouts/{{rollout_id}}{path}": route for path, route in _MODEL_ROUTES.items()},
}


class GatewayApp(FastAPI):
    """FastAPI with a direct way to the POST routes of models.

    FastAPI's middlewares and its search through all routes cost a tenth of such a request's CPU.
    """

    def __init__(self, handlers: Handlers) -> None:
        # No document of FastAPI's: handlers read raw bodies, so it would be empty.
        refused: Any = dict.fromkeys((HTTPException, ApiError, Exception), _refusal)
        super().__init__(
            lifespan=_lifespan,
            openapi_url=None,
            redirect_slashes=False,
            exception_handlers=refused,
        )
        self.state.gateway = handlers
        for path, (method, handler) in ROUTES.items():
            self.router.add_route(path, handler.__get__(handlers), methods=[method])
        self._direct: dict[str, _Handler] = {
            path: handler.__get__(handlers)
            for path, (method, handler) in _MODEL_ROUTES.items()
            if method == "POST"
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        post = scope["type"] == "http" and scope["method"] == "POST"
        handler = self._find(scope) if post else None
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
        except Exception as error:
            if started:  # an answer cannot begin again: the server logs and closes
                raise
            refusal = await _refusal(request, error)
            await refusal(scope, receive, send)
        except asyncio.CancelledError:  # the server ends, and the grace period is over
            if not started:  # else it closes the connection
                stopping = unavailable("the gateway is stopping", "stopping")
                refusal = await _refusal(request, stopping)
                await refusal(scope, receive, send)

    def _find(self, scope: Scope) -> _Handler | None:
        path: str = scope["path"]
        scope["path_params"] = {}
        if path.startswith("/rollouts/"):
            rollout_id, slash, rest = path.removeprefix("/rollouts/").partition("/")
            if not rollout_id:
                return None
            scope["path_params"], path = {"rollout_id": rollout_id}, slash + rest
        return self._direct.get(path)


def create_app(deps: GatewayDependencies) -> FastAPI:
    """Return the gateway as an ASGI app. ``app.state.gateway`` is its Handlers."""
    return GatewayApp(Handlers(deps))


async def _refusal(request: Request, error: Exception) -> Response:
    """Answer a request that failed, in its client's format."""
    if isinstance(error, HTTPException):  # of the router: an unknown path or method
        texts = {
            404: (f"no such path: {request.scope['path'][:200]}", "not_found"),
            405: (f"{request.method} is not allowed here", "method_not_allowed"),
        }
        message, code = texts.get(error.status_code, (str(error.detail), "http_error"))
        hints = (hint for part, hint in _HINTS.items() if part in request.scope["path"])
        message = ": ".join([message, *hints])
        headers = dict(error.headers) if error.headers else None
        error = ApiError(error.status_code, message, code=code, headers=headers)
    elif not isinstance(error, ApiError):
        said = "%s %s failed: %s"
        log.error(said, request.method, request.scope["path"], error, exc_info=unexpected(error))
        error = internal_error()  # without detail, which could quote a credential
    body = anthropic_error(error) if speaks_anthropic(request) else error.body()
    return json_response(body, error.status, error.headers)


@contextlib.asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    handlers: Handlers = app.state.gateway
    await asyncio.to_thread(_warm_up, handlers.deps.renderer)
    sweeper = asyncio.create_task(_sweep(handlers))
    await handlers.providers.start()
    yield
    sweeper.cancel()
    await handlers.providers.close()
    if handlers.deps.forward is not None:
        await asyncio.to_thread(handlers.deps.forward.close)


async def _sweep(handlers: Handlers) -> None:
    while True:
        await asyncio.sleep(_SWEEP_S)
        try:
            await handlers.forget_sealed()
        except Exception as error:  # the store is busy; the next round comes soon
            said = "could not look for sealed attempts: %s"
            log.warning(said, error, exc_info=unexpected(error))


def _warm_up(renderer: Renderer) -> None:
    """Import and compile what the first reply would otherwise wait for."""
    for tools in (False, True):
        renderer.parser(tools=tools).finish("<")
