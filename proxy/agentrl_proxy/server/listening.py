"""Bind listening sockets, and name their addresses.

A gateway without an operator key listens on this machine only.
"""

from __future__ import annotations

import errno
import ipaddress
import socket

_BACKLOG = 2048


def bind(host: str, port: int, *, operator_key: str | None) -> socket.socket:
    """Return a listening socket; port 0 takes a free port, which ``getsockname`` tells.

    Raises:
        ValueError: the host is reachable from other machines and there is no operator key.
        OSError: the port is taken, or the address is not this machine's.
    """
    if operator_key is None and not is_loopback(host):
        raise ValueError(
            f"refusing to listen on {host!r} without an operator key: anyone who reaches the port "
            "could sample; set an operator key, or listen on 127.0.0.1"
        )
    v6 = ":" in host
    family = socket.AF_INET6 if v6 else socket.AF_INET
    # No child inherits it: runners' children must not hold the port.
    try:
        place = (host, port)
        return socket.create_server(place, family=family, backlog=_BACKLOG, dualstack_ipv6=v6)
    except OSError as error:
        why = "is in use; port 0 takes a free one"
        if error.errno != errno.EADDRINUSE:
            why = f"cannot be listened on: {error.strerror}"
        raise OSError(f"{host}:{port} {why}") from error


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def url_of(bound: socket.socket) -> str:
    return http_url(*bound.getsockname()[:2])


def http_url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
