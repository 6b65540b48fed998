"""Pass requests on from a sandbox to the gateway, except those that give rewards.

The command is not to reward itself. Each request is parsed and written anew, so the gateway gets
those requests alone that were looked at, whatever the bytes between them are.
"""

from __future__ import annotations

import socket
from urllib.parse import unquote

import h11

_FORBIDDEN = ("rewards", "traces")
_ANSWER = b"HTTP/1.1 %s\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
_LONGEST_HEAD = 65536


class _Forbidden(Exception):
    """The request gives rewards."""


def pass_requests(client: socket.socket, server: socket.socket) -> None:
    """Pass a connection's requests on until it ends; a refused or malformed one ends it."""
    left, ended = b"", False
    try:
        while left or not ended:
            left, ended = _pass_one(client, server, left, ended)
    except _Forbidden:
        _refuse(client, server, b"403 Forbidden")
    except h11.ProtocolError:
        _refuse(client, server, b"400 Bad Request")


def _refuse(client: socket.socket, server: socket.socket, why: bytes) -> None:
    """Answer, and end the connection; what is left unread would reset it before the answer.

    The gateway hears of the end last: when it hangs up, nothing more goes to the client.
    """
    client.sendall(_ANSWER % why)
    client.shutdown(socket.SHUT_WR)
    server.shutdown(socket.SHUT_WR)
    while client.recv(65536):
        pass


def _pass_one(
    client: socket.socket, server: socket.socket, received: bytes, ended: bool
) -> tuple[bytes, bool]:
    """Pass one request on, which may begin in ``received``.

    Returns:
        What was received behind it, and whether the connection ends there.

    Raises:
        _Forbidden: it gives rewards.
        h11.ProtocolError: it is no request.
    """
    reader = h11.Connection(h11.SERVER, max_incomplete_event_size=_LONGEST_HEAD)
    writer = h11.Connection(h11.CLIENT)
    if received:
        reader.receive_data(received)
    if ended:
        reader.receive_data(b"")
    while True:
        event = reader.next_event()
        while event is h11.NEED_DATA:
            reader.receive_data(client.recv(65536))
            event = reader.next_event()
        if not isinstance(event, h11.Request | h11.Data | h11.EndOfMessage):
            return b"", True  # the connection was closed
        if isinstance(event, h11.Request):
            path = unquote(event.target.decode().partition("?")[0].partition("#")[0])
            if any(part in _FORBIDDEN for part in path.lower().split("/")):
                raise _Forbidden
            # As HTTP/1.1, whatever it came as.
            event = h11.Request(method=event.method, target=event.target, headers=event.headers)
        server.sendall(writer.send(event) or b"")
        if isinstance(event, h11.EndOfMessage):
            return reader.trailing_data
