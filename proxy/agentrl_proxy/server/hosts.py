"""Refuse requests that a web page makes from a browser: check their Host and Origin headers.

A page whose name is rebound to this machine's address (DNS rebinding) can reach a local server, but
its browser sends the page's own name as Host, and the page's site as Origin.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from agentrl_proxy.errors import forbidden
from agentrl_proxy.server.sse import json_response

log = logging.getLogger("agentrl.proxy")

_KNOWN = 256  # names whose judgment is remembered, and refusals that are logged


class HostCheck:
    """An ASGI app that answers 403 to requests with a foreign Host or Origin, else is ``app``.

    Loopback's names and addresses, the address that was bound, and ``allowed`` are not foreign. A
    server that listens on all addresses has its machine's name, and takes any address as Host: what
    a page can rebind is a name. (Starlette's TrustedHostMiddleware knows neither Origin nor
    addresses.) A request without Host (HTTP/1.0) comes from no browser.

    Args:
        bound: the address that the server listens on.
        allowed: further names; ``*.example.com`` is every name below it, ``*`` any name.
    """

    def __init__(self, app: ASGIApp, bound: str, allowed: Iterable[str] = ()) -> None:
        self._app = app
        names = {"localhost", bound, *allowed}
        self._any_address = (
            _address(bound) is not None and ipaddress.ip_address(bound).is_unspecified
        )
        if self._any_address:
            own = socket.gethostname()
            names |= {own, own.partition(".")[0], f"{own.partition('.')[0]}.local"}
        self._names = {_plain(name) for name in names}
        self._below = tuple(name[1:] for name in self._names if name.startswith("*."))
        self._known: set[tuple[bytes, bytes]] = set()  # Host and Origin of requests that passed
        self._refused = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers: list[tuple[bytes, bytes]] = scope["headers"]
            by_name = dict(headers)
            host, origin = by_name.get(b"host", b""), by_name.get(b"origin", b"")
            if len(by_name) < len(headers):
                # Of two, a server behind this one might believe the other.
                names = [name for name, _ in headers]
                host = host if names.count(b"host") < 2 else b"two hosts"
                origin = origin if names.count(b"origin") < 2 else b"null"
            if (host, origin) not in self._known:
                if refusal := self._refusal(host.decode("latin-1"), origin.decode("latin-1")):
                    error = forbidden(refusal, "host_not_allowed")
                    await json_response(error.body(), error.status)(scope, receive, send)
                    return
                if len(self._known) < _KNOWN:
                    self._known.add((host, origin))
        await self._app(scope, receive, send)

    def _refusal(self, host: str, origin: str) -> str | None:
        for header, value, name in (
            ("Host", host, _name_in(f"//{host}")),
            ("Origin", origin, _name_in(origin)),
        ):
            same_site = header == "Origin" and value.partition("://")[2] == host
            is_address = header == "Host" and self._any_address and _address(name) is not None
            if value and not (same_site or is_address or self._is_ours(name)):
                said = f"{header} {value[:200]!r} is not this server's: a web page may not use it"
                self._refused += 1
                if self._refused <= _KNOWN:  # an agent could fill the disk
                    log.warning("refused a request: %s", said)
                return f"{said}. Start the server with --allowed-host {name or 'NAME'} to allow it"
        return None

    def _is_ours(self, name: str) -> bool:
        if name in self._names or "*" in self._names or (name and name.endswith(self._below)):
            return True
        address = _address(name)
        return address is not None and address.is_loopback


def _name_in(url: str) -> str:
    """Return the host of a URL, without port; empty if there is none."""
    try:
        return _plain(urlsplit(url).hostname or "")
    except ValueError:
        return ""


def _plain(name: str) -> str:
    """Return the form in which names are compared: a final dot and upper case mean nothing."""
    return name.strip("[]").rstrip(".").lower()


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None
