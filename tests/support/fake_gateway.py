"""An HTTP server that stands in for the gateway: runners need its health and its OTLP endpoint."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from local_server import LocalServer
from store_records import record_spans

from agentrl_tracer.otlp_codec import parse_traces, rewards_in
from agentrl_tracer.store import Store


class FakeGateway(LocalServer):
    """Answers /healthz and takes spans and rewards, as the real one does."""

    def __init__(self, store: Store, host: str = "127.0.0.1") -> None:
        self.store = store
        self.boot_id = "boot-1"
        self.healthy = True
        self.takes_spans = True
        self.delay_s = 0.0  # before it answers for spans
        super().__init__(host)

    def answer(
        self, path: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, bytes, dict[str, str]]:
        if path == "/healthz":
            health = {"boot_id": self.boot_id, "recoveries": 0, "context_length": 4096}
            return 200 if self.healthy else 503, json.dumps(health).encode(), {}
        time.sleep(self.delay_s)
        ref = self.store.authenticate(headers["authorization"].removeprefix("Bearer "))
        if not self.takes_spans or ref is None or ref.rollout_id not in path:
            return 400, b"", {}
        spans = parse_traces(body, headers["content-type"], ref.rollout_id, ref.attempt_id)
        record_spans(self.store, spans, rewards_in(spans))
        return 200, b"", {}


def until(happened: Callable[[], Any], timeout_s: float = 10.0, log: Any = str) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (result := happened()):
        assert time.monotonic() < deadline, f"waited in vain\n{log()}"
        time.sleep(0.02)
    return result
