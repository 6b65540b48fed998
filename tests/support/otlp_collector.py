"""A real OTLP/HTTP endpoint that keeps what it gets."""

from __future__ import annotations

from local_server import LocalServer

from agentrl_proxy.dependencies import MAX_BODY_BYTES
from agentrl_tracer.otlp_codec import parse_traces
from agentrl_tracer.schemas import Span


class Collector(LocalServer):
    def __init__(self) -> None:
        self.statuses: list[int] = []  # of the next answers; then ``status``
        self.status = 200
        self.requests: list[
            tuple[str, dict[str, str]]
        ] = []  # path and headers, of refused ones too
        self.spans: list[Span] = []  # of accepted requests
        super().__init__()

    def answer(
        self, path: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, bytes, dict[str, str]]:
        status = self.statuses.pop(0) if self.statuses else self.status
        if len(body) > MAX_BODY_BYTES:  # as the gateway does
            status = 413
        self.requests.append((path, headers))
        if status == 200:
            self.spans += parse_traces(body, headers["content-type"], None, None)
        return status, b"", {}
