"""A real OTLP/HTTP endpoint that keeps what it gets."""

from __future__ import annotations

import contextlib
import gzip
import http.server
import threading
from collections.abc import Iterator
from typing import Any

from agentrl_tracer.otlp_codec import parse_traces
from agentrl_tracer.schemas import Span


class Collector(http.server.ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.statuses: list[int] = []  # of the next answers; then ``status``
        self.status = 200
        self.requests: list[
            tuple[str, dict[str, str]]
        ] = []  # path and headers, also of refused ones
        self.spans: list[Span] = []  # of accepted requests

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        status = self.server.statuses.pop(0) if self.server.statuses else self.server.status
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.requests.append((self.path, headers))
        if status == 200:
            self.server.spans += parse_traces(body, headers["content-type"], None, None)
        self.send_response(status)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextlib.contextmanager
def collecting() -> Iterator[Collector]:
    server = Collector()
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()
