"""Build the gateway's ASGI app: its routes, and errors in the client's format."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from agentrl_proxy.dependencies import GatewayDependencies
from agentrl_proxy.errors import ApiError
from agentrl_proxy.handlers import Handlers, speaks_anthropic
from agentrl_proxy.protocols.messages import anthropic_error
from agentrl_proxy.rendering.renderer import Renderer
from agentrl_proxy.server.sse import internal_error

log = logging.getLogger("agentrl.proxy")

_Routes = dict[str, tuple[str, Callable[[Handlers, Request], Awaitable[Response]]]]

_SWEEP_S = 2.0
# The method and handler of each path.
_MODEL_ROUTES: _Routes = {
    "/v1/models": ("GET", Handlers.models),
    "/v1/models/": ("GET", Handlers.model),  # a name follows
    "/v1/chat/completions": ("POST", Handlers.chat_completions),
    "/v1/completions": ("POST", Handlers.completions),
    "/v1/responses": ("POST", Handlers.responses),
    "/v1/messages": ("POST", Handlers.messages),
    "/v1/messages/count_tokens": ("POST", Handlers.count_tokens),
    "/v1/traces": ("POST", Handlers.traces),
}
GATEWAY_ROUTES: _Routes = _MODEL_ROUTES | {
    "/healthz": ("GET", Handlers.healthz),
    "/openapi.json": ("GET", Handlers.openapi),
    "/admin/adapters": ("POST", Handlers.load_adapter),
}
ROLLOUT_ROUTES: _Routes = _MODEL_ROUTES | {  # under /rollouts/{rollout_id}
    "/v1/rewards": ("POST", Handlers.rewards)
}


class GatewayApp(Starlette):
    """Routes requests by a look into a dictionary.

    Starlette's middlewares and its search through all routes cost a tenth of a request's CPU.
    """

    def __init__(self, handlers: Handlers) -> None:
        super().__init__(lifespan=_lifespan)
        self.state.gateway = self._handlers = handlers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # the server starts or ends
            await super().__call__(scope, receive, send)
            return
        request = Request(scope, receive)
        try:
            handler = _find(scope)
            response = await handler(self._handlers, request)
            await response(scope, receive, send)
        except ApiError as error:
            await _refusal(request, error)(scope, receive, send)
        except Exception:
            log.exception("%s %s failed", scope["method"], scope["path"])
            # The client gets no detail: it could quote a credential.
            await _refusal(request, internal_error())(scope, receive, send)


def create_app(deps: GatewayDependencies) -> Starlette:
    """Return the gateway as an ASGI app. ``app.state.gateway`` is its Handlers."""
    return GatewayApp(Handlers(deps))


def _find(scope: Scope) -> Callable[[Handlers, Request], Awaitable[Response]]:
    """Return a request's handler, and put its path's parameters into the scope.

    Raises:
        ApiError: there is no such path (404), or not with this method (405).
    """
    path: str = scope["path"]
    routes, parameters = GATEWAY_ROUTES, scope.setdefault("path_params", {})
    if path.startswith("/rollouts/"):
        rollout_id, slash, rest = path.removeprefix("/rollouts/").partition("/")
        if rollout_id:
            routes, path = ROLLOUT_ROUTES, slash + rest
            parameters["rollout_id"] = rollout_id
    if path.startswith("/v1/models/"):
        parameters["model"] = path.removeprefix("/v1/models/")
        path = "/v1/models/"
    route = routes.get(path)
    if route is None:
        raise ApiError(404, f"no such path: {scope['path'][:200]}", code="not_found")
    method, handler = route
    if scope["method"] != method and (scope["method"], method) != ("HEAD", "GET"):
        message = f"{scope['method']} is not allowed here"
        raise ApiError(405, message, code="method_not_allowed", headers={"allow": method})
    return handler


def _refusal(request: Request, error: ApiError) -> Response:
    anthropic = speaks_anthropic(request)
    return Response(
        orjson.dumps(anthropic_error(error)) if anthropic else error.json(),
        status_code=error.status,
        headers=error.headers,
        media_type="application/json",
    )


@contextlib.asynccontextmanager
async def _lifespan(app: Starlette) -> AsyncIterator[None]:
    handlers: Handlers = app.state.gateway
    await asyncio.to_thread(_warm_up, handlers.deps.renderer)
    sweeper = asyncio.create_task(_sweep(handlers))
    handlers.providers.start()
    yield
    sweeper.cancel()
    await handlers.providers.close()
    if handlers.forward is not None:
        await asyncio.to_thread(handlers.forward.close)


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
