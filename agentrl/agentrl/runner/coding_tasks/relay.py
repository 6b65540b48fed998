"""Start a command with limits inside its sandbox, and connect it to the gateway alone.

A sandbox without network has a loopback of its own. There a relay listens where the gateway listens
outside, and passes each connection on through a Unix socket to a relay outside. That one refuses
requests which give rewards, because the command is not to reward itself.

Runs as a script, too, with no more than the standard library: ``relay.py JSON COMMAND ...``.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import socket
import sys
import threading
from collections.abc import Callable
from urllib.parse import unquote

# Only from the first byte of a word: from each byte, a body without spaces would take minutes.
_REQUEST = re.compile(rb"(?<!\S)\S+[ \t]+(\S+)[ \t]+HTTP/1\.[01]")
_FORBIDDEN = re.compile(r"/(rewards|traces)/*(\?|$)", re.IGNORECASE)
_REFUSED = b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
_LONGEST_LINE = 16384

Connect = Callable[[], socket.socket]


def relay(listener: socket.socket, connect: Connect, *, guard: bool = False) -> None:
    """Pass connections on until the listener is closed.

    Args:
        guard: refuse requests that give rewards.
    """
    while True:
        try:
            client, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=_pass_on, args=(client, connect, guard), daemon=True).start()


def _pass_on(client: socket.socket, connect: Connect, guard: bool) -> None:
    try:
        server = connect()
    except OSError:
        client.close()
        return
    with client, server:
        back = threading.Thread(target=_pump, args=(server, client, False), daemon=True)
        back.start()
        _pump(client, server, guard)
        back.join()


def _pump(source: socket.socket, target: socket.socket, guard: bool) -> None:
    line = b""  # the end of what was passed on, in which a request may begin
    try:
        while data := source.recv(65536):
            line += data if guard else b""
            for match in _REQUEST.finditer(line):
                if _FORBIDDEN.search(unquote(match[1].decode("latin-1"))):
                    source.sendall(_REFUSED)
                    return
            line = line.rpartition(b"\n")[2][-_LONGEST_LINE:]
            target.sendall(data)
    except OSError:
        pass
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
