"""Start a command with limits inside its sandbox, and connect it to the gateway alone.

A sandbox without network has a loopback of its own. There a relay listens where the gateway listens
outside, and passes each connection on through a Unix socket to a relay outside, which looks at the
requests (``guard``).

Runs as a script, too, with no more than the standard library: ``relay.py JSON COMMAND ...``.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import sys
import threading
from collections.abc import Callable

Connect = Callable[[], socket.socket]
Forward = Callable[[socket.socket, socket.socket], None]


def pump(source: socket.socket, target: socket.socket) -> None:
    """Pass everything on until the source ends."""
    while data := source.recv(65536):
        target.sendall(data)


def relay(listener: socket.socket, connect: Connect, forward: Forward = pump) -> None:
    """Pass connections on until the listener is closed.

    Args:
        forward: passes on what a client sends; it ends when that ends, or to end the connection.
    """
    while True:
        try:
            client, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=_pass_on, args=(client, connect, forward), daemon=True).start()


def _pass_on(client: socket.socket, connect: Connect, forward: Forward) -> None:
    try:
        server = connect()
    except OSError:
        client.close()
        return
    with client, server:
        back = threading.Thread(target=_half, args=(pump, server, client), daemon=True)
        back.start()
        _half(forward, client, server)
        back.join()


def _half(forward: Forward, source: socket.socket, target: socket.socket) -> None:
    try:
        with contextlib.suppress(OSError):
            forward(source, target)
    finally:
        for end, how in ((source, socket.SHUT_RD), (target, socket.SHUT_WR)):
            with contextlib.suppress(OSError):
                end.shutdown(how)


def unix_socket(path: str) -> socket.socket:
    connected = socket.socket(socket.AF_UNIX)
    connected.connect(path)
    return connected


def _main(options: str, *command: str) -> None:
    """Serve the relay in a child process, set the limits, and become the command."""
    told = json.loads(options)
    if path := told.get("socket"):
        listener = socket.create_server(("127.0.0.1", told["port"]))
        if os.fork() == 0:
            relay(listener, lambda: unix_socket(path))
            os._exit(0)
        listener.close()
    for kind, limit in ((resource.RLIMIT_CPU, "cpu"), (resource.RLIMIT_DATA, "memory")):
        if told.get(limit):
            resource.setrlimit(kind, (told[limit], told[limit]))
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        os._exit(127)


if __name__ == "__main__":
    _main(*sys.argv[1:])
