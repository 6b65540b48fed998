"""Build the gateway's ASGI app: its routes, and errors in the client's format."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib.metadata import version
from typing import Any

import orjson
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from agentrl_proxy.dependencies import GatewayDependencies
from agentrl_proxy.errors import ApiError
from agentrl_proxy.handlers import Handlers, speaks_anthropic
from agentrl_proxy.protocols.messages_events import anthropic_error
from agentrl_proxy.rendering.renderer import Renderer
from agentrl_proxy.server.sse import internal_error

log = logging.getLogger("agentrl.proxy")

Handler = Callable[[Request], Awaitable[Response]]

_SWEEP_S = 2.0
# Path, method and handler of each route.
_GATEWAY_ROUTES = (
    ("/healthz", "GET", Handlers.healthz),
    ("/openapi.json", "GET", Handlers.openapi),
    ("/admin/adapters", "POST", Handlers.load_adapter),
    ("/rollouts/{rollout_id}/v1/rewards", "POST", Handlers.rewards),
)
# These also exist under /rollouts/{rollout_id}.
_MODEL_ROUTES = (
    ("/v1/models", "GET", Handlers.models),
    ("/v1/models/{model:path}", "GET", Handlers.model),
    ("/v1/chat/completions", "POST", Handlers.chat_completions),
    ("/v1/completions", "POST", Handlers.completions),
    ("/v1/responses", "POST", Handlers.responses),
    ("/v1/messages", "POST", Handlers.messages),
    ("/v1/messages/count_tokens", "POST", Handlers.count_tokens),
    ("/v1/traces", "POST", Handlers.traces),
)
_HOT_PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/traces")


class GatewayApp(FastAPI):
    """FastAPI with a direct way to the hot routes.

    FastAPI's middlewares and its search through all routes cost a tenth of such a request's CPU.

    Args:
        direct: handlers of POST requests by path, which ``/rollouts/<id>`` may precede.
    """

    def __init__(self, direct: dict[str, Handler], **settings: Any) -> None:
        super().__init__(**settings)
        self._direct = direct

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
    """Return the gateway as an ASGI app. ``app.state.gateway`` is its Handlers."""
    handlers = Handlers(deps)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await asyncio.to_thread(_warm_up, deps.renderer)
        sweeper = asyncio.create_task(_sweep(handlers))
        handlers.providers.start()
        yield
        sweeper.cancel()
        await handlers.providers.close()
        if handlers.forward is not None:
            await asyncio.to_thread(handlers.forward.close)

    direct = {path: h.__get__(handlers) for path, _, h in _MODEL_ROUTES if path in _HOT_PATHS}
    app = GatewayApp(
        direct,
        title="agentrl gateway",
        version=version("agentrl-middleware"),
        lifespan=lifespan,
        openapi_url=None,  # handlers read raw bodies, so FastAPI's document would be empty
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.gateway = handlers
    in_rollouts = [(f"/rollouts/{{rollout_id}}{path}", m, h) for path, m, h in _MODEL_ROUTES]
    for path, method, handler in (*_GATEWAY_ROUTES, *_MODEL_ROUTES, *in_rollouts):
        app.router.add_route(path, handler.__get__(handlers), methods=[method])
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _any_error)
    return app


async def _sweep(handlers: Handlers) -> None:
    while True:
        await asyncio.sleep(_SWEEP_S)
        try:
            await handlers.forget_sealed()
        except Exception:  # the store is busy; the next round comes soon
            log.warning("could not look for sealed attempts", exc_info=True)


def _warm_up(renderer: Renderer) -> None:
    """Import and compile what the first reply would otherwise wait for."""
    for tools in (False, True):
        parser = renderer.parser(tools=tools)
        parser.feed("<")
        parser.finish()


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    anthropic = speaks_anthropic(request)
    return Response(
        orjson.dumps(anthropic_error(error)) if anthropic else error.json(),
        status_code=error.status,
        headers=error.headers,
        media_type="application/json",
    )


async def _http_error(request: Request, error: Exception) -> Response:
    """Answer unknown paths and methods, which the router refuses."""
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
    # The server logs the traceback. The client gets no detail: it could quote a credential.
    return await _api_error(request, internal_error())
