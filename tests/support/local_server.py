"""An HTTP server on a free port, in a thread."""

from __future__ import annotations

import gzip
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class LocalServer(ThreadingHTTPServer):
    """Answers requests with ``answer``, from the end of the constructor until ``close``."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        super().__init__((host, 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self._thread = threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def answer(
        self, path: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, bytes, dict[str, str]]:
        """Return status, body and headers; the names of the request's headers are lower-case."""
        raise NotImplementedError

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: LocalServer

    def do_POST(self) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        body = self.rfile.read(int(headers.get("content-length", 0)))
        if headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        status, said, more = self.server.answer(self.path, headers, body)
        self.send_response(status)
        for name, value in {"content-length": str(len(said)), **more}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(said)

    do_GET = do_POST

    def log_message(self, *_: Any) -> None: ...
