"""An HTTP server that stands in for the gateway: runners need its health and its OTLP endpoint."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from store_records import record_spans

from agentrl_tracer.otlp_codec import parse_traces, rewards_in
from agentrl_tracer.store import Store


class FakeGateway:
    """Answers /healthz and takes spans and rewards, as the real one does."""

    def __init__(self, store: Store, host: str = "127.0.0.1") -> None:
        self.boot_id = "boot-1"
        self.healthy = True
        self.takes_spans = True
        gateway = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args: Any) -> None: ...

            def do_GET(self) -> None:
                body = json.dumps({"boot_id": gateway.boot_id, "recoveries": 0}).encode()
                self._answer(200 if gateway.healthy else 503, body)

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                ref = store.authenticate(self.headers["authorization"].removeprefix("Bearer "))
                if not gateway.takes_spans or ref is None or ref.rollout_id not in self.path:
                    self._answer(400, b"")
                    return
                spans = parse_traces(
                    body, self.headers["content-type"], ref.rollout_id, ref.attempt_id
                )
                record_spans(store, spans, rewards_in(spans))
                self._answer(200, b"")

            def _answer(self, code: int, body: bytes) -> None:
                self.send_response(code)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        self._server = ThreadingHTTPServer((host, 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def until(happened: Callable[[], Any], timeout_s: float = 10.0, log: Any = str) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (result := happened()):
        assert time.monotonic() < deadline, f"waited in vain\n{log()}"
        time.sleep(0.02)
    return result
