"""The app: its pages, errors, static files, and how it is served."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import FrameType

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.staticfiles import StaticFiles

from agentrl.config.errors import ConfigError
from agentrl.config.secrets import MissingSecretError
from agentrl.gateway.on_demand import Replayer
from agentrl.history.rollout.vocabulary import Vocabularies
from agentrl.history.run_list import RunList
from agentrl.history.sources import Sources
from agentrl.ui.access import TokenGate
from agentrl.ui.pages import PAGES
from agentrl.ui.views import STATIC, page
from agentrl.ui.watcher import Watcher
from agentrl_proxy.server.hosts import HostCheck
from agentrl_tracer.store import StoreError


def create_app(root: Path, stores: Sequence[str] = ()) -> FastAPI:
    """Make the app over the runs below ``root``, and those in PostgreSQL ``stores``."""
    app = FastAPI(openapi_url=None, lifespan=_lifespan)
    app.state.sources, app.state.watcher = Sources(root, stores), Watcher()
    app.state.vocabularies, app.state.replayer = Vocabularies(), Replayer()
    app.state.run_list = RunList(app.state.sources)
    for router in PAGES:
        app.include_router(router)
    app.mount("/static", StaticFiles(directory=STATIC))
    of_requests = HTTPException, RequestValidationError
    for kind in (ConfigError, MissingSecretError, StoreError, *of_requests):
        app.add_exception_handler(kind, _said)
    return app


def serve(app: FastAPI, listening: socket.socket, token: str) -> None:
    """Serve on a bound socket until SIGINT or SIGTERM."""
    host, port = listening.getsockname()[:2]
    config = uvicorn.Config(
        TokenGate(HostCheck(app, host), token, port), loop="uvloop", lifespan="on",
        access_log=False, log_config=None, server_header=False, timeout_graceful_shutdown=1,
    )  # fmt: skip
    _Server(config, app.state.watcher).run(sockets=[listening])


class _Server(uvicorn.Server):
    """Ends the live events of open pages first, which would keep it from ending in order."""

    def __init__(self, config: uvicorn.Config, watcher: Watcher) -> None:
        super().__init__(config)
        self._watcher = watcher

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._watcher.end()
        super().handle_exit(sig, frame)


@contextlib.asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    app.state.watcher.start()
    yield
    app.state.watcher.stop()
    app.state.replayer.close()
    app.state.sources.close()
    app.state.vocabularies.close()


async def _said(request: Request, error: Exception) -> Response:
    """Say in a sentence what is wrong."""
    if isinstance(error, HTTPException):
        return page(request, "error.html", error.status_code, said=error.detail)
    if isinstance(error, RequestValidationError):
        said = "; ".join(f"{one['loc'][-1]}: {one['msg']}" for one in error.errors())
        return page(request, "error.html", 422, said=said)
    status = 503 if isinstance(error, StoreError) else 404
    return page(request, "error.html", status, said=str(error))
