"""What was recorded also reaches an OTLP backend; one that is away is in nobody's way."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from gateway_client import post, reward_export
from scripted_sampler import OPERATOR_KEY, Running

from agentrl_proxy.telemetry import otlp_export as forward
from agentrl_proxy.telemetry.otlp_export import OtlpExporter
from agentrl_tracer.otlp_codec import export_request, parse_traces
from agentrl_tracer.schemas import Span


class Backend(http.server.ThreadingHTTPServer):
    """Any OTLP/HTTP backend."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.statuses: list[int] = []  # of the next answers; then 200
        self.spans: list[Span] = []
        self.seen: list[tuple[str, str | None]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Backend

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        status = self.server.statuses.pop(0) if self.server.statuses else 200
        self.server.seen.append((self.path, self.headers["x-project"]))
        if status == 200:
            self.server.spans += parse_traces(body, self.headers["content-type"], None, None)
        self.send_response(status)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def backend() -> Iterator[Backend]:
    server = Backend()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(forward, "_CLOSE_S", 2.0)


def wait_for(happened: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 20
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def ask(gateway: Running) -> None:
    claim = gateway.claims[0]
    body = {"model": "policy", "messages": [{"role": "user", "content": "Hi"}]}
    traceparent = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01", "x-agentrl-agent": "player"}
    answer = post(
        f"{gateway.base_url(claim)}/chat/completions", claim.key, body, headers=traceparent
    )
    assert answer.status_code == 200


def test_spans_calls_and_rewards_are_forwarded(
    start: Callable[..., Running], backend: Backend
) -> None:
    gateway = start(forward=OtlpExporter(backend.url, {"x-project": "agentrl"}))
    claim = gateway.claims[0]
    backend.statuses = [503]  # passing: tried again
    ask(gateway)
    base = gateway.base_url(claim)
    assert post(f"{base}/traces", claim.key, reward_export({"doubleValue": 0.5})).status_code == 200
    assert post(f"{base}/rewards", claim.key, {"value": 1}).status_code == 200
    wait_for(lambda: len(backend.spans) == 3)
    assert set(backend.seen) == {("/v1/traces", "agentrl")}
    by_value = {s.attributes.get("gen_ai.evaluation.score.value"): s for s in backend.spans}
    assert by_value[0.5].span_id == "b7ad6b7169203331"  # as it came
    assert by_value[1.0].name == "agentrl.reward"
    call = by_value[None]
    assert (call.trace_id, call.parent_span_id) == ("ab" * 16, "cd" * 8)
    assert call.attributes["gen_ai.agent.name"] == "player"
    [recorded] = gateway.calls(claim)
    assert call.attributes["gen_ai.response.id"] == recorded.response_id
    assert call.attributes["gen_ai.usage.output_tokens"] == len(recorded.response_ids)
    assert {s.attributes["agentrl.rollout.id"] for s in backend.spans} == {claim.rollout_id}
    operator = {"authorization": f"Bearer {OPERATOR_KEY}"}
    health = httpx.get(f"{gateway.url}/healthz", headers=operator).json()
    assert health["forward_otlp"] == {"sent": 3, "lost": 0, "queued": 0}


def test_a_dead_backend_costs_nothing_but_a_count(start: Callable[..., Running]) -> None:
    forwarding = OtlpExporter("http://127.0.0.1:9")
    gateway = start(forward=forwarding)
    began = time.monotonic()
    ask(gateway)
    assert time.monotonic() - began < 10
    wait_for(lambda: forwarding.lost == 1)


def test_what_does_not_fit_is_counted(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "_MAX_QUEUED", 10)
    backend.statuses = [400] * 100  # not passing: not tried again
    forwarding = OtlpExporter(backend.url)
    body = json.dumps(reward_export({"doubleValue": 1.0})).encode()
    spans = parse_traces(body, "application/json", "r", "a")
    for _ in range(50):
        forwarding.put(spans)
    forwarding.close()
    assert (forwarding.sent, forwarding.lost) == (0, 50)
    assert backend.spans == []


def test_spans_leave_as_they_came() -> None:
    values = [True, 3, -1.5, "text", None, [1, ["a"]], {"x": {"y": [2]}}, 2**70]
    span = Span(
        "ab" * 16, "cd" * 8, "ef" * 8, "name", "client", 1, 2, "error",
        {str(i): value for i, value in enumerate(values)},
        [{"name": "event", "time_ns": 5, "attributes": {"a": 1}}], {"service.name": "s"}, "r", "a",
    )  # fmt: skip
    [back] = parse_traces(export_request([span]), "application/x-protobuf", "r", "a")
    assert back.attributes.pop("agentrl.rollout.id") == "r"
    assert back.attributes.pop("agentrl.attempt.id") == "a"
    assert back.attributes.pop("7") == str(span.attributes.pop("7"))
    assert back == span
