"""A PostgreSQL server that a test stops, and a connection that loses the answer to a commit."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any


def crash(server: Any) -> None:
    """Kill the server like a crash: its next start recovers."""
    process = server.get_postmaster_info().process
    os.kill(process.pid, signal.SIGQUIT)
    process.wait(10)


class LossyRelay:
    """A Unix socket before the server. Armed, it loses the answer to the next COMMIT."""

    def __init__(self, folder: Path, server: Path) -> None:
        self._server = server
        self.armed = False
        self.lost = 0
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(folder / ".s.PGSQL.5432"))
        self._listening.listen()
        self.url = f"postgresql://postgres:@/postgres?host={folder}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                client, _ = self._listening.accept()
                server = socket.socket(socket.AF_UNIX)
                server.connect(str(self._server / ".s.PGSQL.5432"))
                for ends in ((client, server), (server, client)):
                    threading.Thread(target=self._pump, args=ends, daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if b"COMMIT\0" in data and self.armed:
                    self.armed = False
                    self.lost += 1
                    source.shutdown(socket.SHUT_RDWR)  # the client hears nothing more
                    target.sendall(data)
                    return
                target.sendall(data)
        with suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listening.close()


@contextmanager
def relay_to(server: Any, folder: Path) -> Iterator[LossyRelay]:
    folder.mkdir()
    with closing(LossyRelay(folder, server.get_postmaster_info().socket_dir)) as relay:
        yield relay
