"""The app on a port: uvicorn with uvloop and httptools, on a socket bound beforehand.

Knows sockets and the rule that a gateway without an operator key stays on this machine. Does not
know what the app does.
"""

from __future__ import annotations

import contextlib
import ipaddress
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator

import uvicorn
from fastapi import FastAPI

from agentrl_proxy.server.connection import Limits, guarded
from agentrl_proxy.stats import GatewayStats

_BACKLOG = 2048


def bind(host: str, port: int, *, operator_key: str | None) -> socket.socket:
    """A bound socket; port 0 takes a free one, which ``getsockname`` tells.

    Raises:
        ValueError: the host is reachable from other machines and there is no operator key.
        OSError: the port is taken.
    """
    if operator_key is None and not is_loopback(host):
        raise ValueError(
            f"refusing to listen on {host!r} without an operator key: anyone who reaches the port "
            "could sample; set an operator key, or listen on 127.0.0.1"
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        bound.listen(_BACKLOG)
        bound.set_inheritable(False)  # runners' children must not hold the port
    except BaseException:
        bound.close()
        raise
    return bound


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def url_of(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(
    app: FastAPI, host: str, port: int, *, on_bound: Callable[[str], None] | None = None
) -> None:
    """Serves until told to stop (SIGINT, SIGTERM). ``on_bound`` gets the URL before the start."""
    bound = bind(host, port, operator_key=app.state.gateway.deps.operator_key)
    with bound:
        if on_bound is not None:
            on_bound(url_of(bound))
        serve_on(app, bound)


def serve_on(app: FastAPI, listening: socket.socket) -> None:
    """Serves on a socket that listens already, until told to stop (SIGINT, SIGTERM).

    Told to stop, it takes no new connections, lets answers under way finish within the grace
    period, and cancels the others, which records them. SIGTERM ends in ``SystemExit``: by
    default it would kill the process before its callers could close the store.
    """
    in_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, _leave) if in_main else None
    try:
        _server(app).run(sockets=[listening])
    finally:
        if in_main:
            signal.signal(signal.SIGTERM, before)


def _leave(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


@contextlib.contextmanager
def serving(app: FastAPI, host: str = "127.0.0.1", port: int = 0) -> Iterator[str]:
    """Serves from a thread of this process for as long as the context lasts; gives the URL."""
    bound = bind(host, port, operator_key=app.state.gateway.deps.operator_key)
    server = _server(app)
    thread = threading.Thread(
        target=server.run, kwargs={"sockets": [bound]}, name="gateway", daemon=True
    )
    with bound:
        thread.start()
        try:
            while not server.started:
                if not thread.is_alive():
                    raise RuntimeError("the gateway did not start; its log says why")
                time.sleep(0.01)
            yield url_of(bound)
        finally:
            server.should_exit = True
            thread.join(timeout=_limits(app).grace_s + 10)


def _limits(app: FastAPI) -> Limits:
    return app.state.gateway.deps.limits


def _server(app: FastAPI) -> uvicorn.Server:
    limits = _limits(app)
    stats: GatewayStats = app.state.gateway.stats

    def count_overload() -> None:
        stats.overloaded += 1

    config = uvicorn.Config(
        app,
        loop="uvloop",
        http=guarded(limits, count_overload),
        ws="none",
        lifespan="on",
        access_log=False,  # every call is in the store; paths would fill the log
        log_config=None,
        server_header=False,
        proxy_headers=False,  # nobody stands between us and the agents
        date_header=False,
        timeout_graceful_shutdown=limits.grace_s,
        timeout_keep_alive=75,
    )
    return uvicorn.Server(config)
