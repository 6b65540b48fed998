from __future__ import annotations

import gzip
import http.server
import json
import math
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import trace

from agentrl import emit_reward
from agentrl_tracer import otlp_codec as otlp
from agentrl_tracer import tracing as agent
from agentrl_tracer.schemas import Span


class Collector(http.server.ThreadingHTTPServer):
    """A real OTLP endpoint that keeps what it gets."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[tuple[str, str, bytes]] = []
        self.status = 200

    @property
    def spans(self) -> list[Span]:
        return [
            span
            for _, kind, body in self.requests
            for span in otlp.parse_traces(body, kind, "r1", "a1")
        ]


class Handler(http.server.BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        if self.server.status == 200:
            self.server.requests.append((self.path, self.headers["content-type"], body))
        self.send_response(self.server.status)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    server = Collector()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for name, value in {
        "AGENTRL_ROLLOUT_ID": "r1",
        "AGENTRL_ATTEMPT_ID": "a1",
        "AGENTRL_GATEWAY": f"http://127.0.0.1:{server.server_port}",
        "AGENTRL_KEY": "secret",
        "TRACEPARENT": f"00-{'ab' * 16}-{'cd' * 8}-01",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(agent, "_active", None)
    yield server
    if agent._active is not None:
        agent._active.close()
    server.shutdown()
    server.server_close()


def test_outside_a_rollout_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AGENTRL_ROLLOUT_ID", raising=False)
    emit_reward(1.0)
    emit_reward("nonsense")  # type: ignore[arg-type]
    assert agent.flush()


def test_a_reward_arrives_before_emit_returns(collector: Collector) -> None:
    emit_reward(0.5, explanation="half right", response_id="chatcmpl-1")
    (path, _, _) = collector.requests[0]
    assert path == "/rollouts/r1/v1/traces"
    (reward,) = otlp.rewards_in(collector.spans)
    assert (reward.name, reward.value) == ("reward", 0.5)
    assert (reward.response_id, reward.explanation) == ("chatcmpl-1", "half right")
    assert collector.spans[0].trace_id == "ab" * 16  # the runner's TRACEPARENT


def test_a_reward_belongs_to_the_current_span(collector: Collector) -> None:
    with agent.tracing("agent"):
        span = trace.get_current_span().get_span_context()
        emit_reward({"style": 1, "truth": True})
    assert agent.flush()
    rewards = otlp.rewards_in(collector.spans)
    assert {(r.name, r.value) for r in rewards} == {("style", 1.0), ("truth", 1.0)}
    assert {r.span_id for r in rewards} == {f"{span.span_id:016x}"}
    root = next(s for s in collector.spans if s.name == "agent")
    assert root.parent_span_id == "cd" * 8


@pytest.mark.parametrize("value", [math.nan, math.inf, "1", None, b"1", object()])
def test_what_is_no_finite_number_is_refused(collector: Collector, value: Any) -> None:
    with pytest.raises(ValueError, match="give a finite number"):
        emit_reward(value)
    assert collector.requests == []


def test_an_undelivered_reward_is_noticed(
    collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    collector.status = 400  # not retried by the exporter
    emit_reward(1.0)
    assert not agent.flush()
    assert "did not reach the gateway" in caplog.text


def test_otlp_json_ids_are_hex() -> None:
    body = {
        "resourceSpans": [
            {
                "resource": {"attributes": [{"key": "a", "value": {"stringValue": "b"}}]},
                "scopeSpans": [
                    {
                        "spans": [
                            {
                                "traceId": "5b8efff798038103d269b633813fc60c",
                                "spanId": "eee19b7ec3c1b174",
                                "name": "agentrl.reward",
                                "startTimeUnixNano": "1544712660000000000",
                                "endTimeUnixNano": "1544712660000000000",
                                "attributes": [
                                    {
                                        "key": "gen_ai.evaluation.score.value",
                                        "value": {"doubleValue": -1.5},
                                    },
                                    {
                                        "key": "list",
                                        "value": {"arrayValue": {"values": [{"intValue": "3"}]}},
                                    },
                                ],
                            }
                        ]
                    }
                ],
            }
        ]
    }
    (span,) = otlp.parse_traces(json.dumps(body).encode(), "application/json", "r1", "a1")
    assert span.trace_id == "5b8efff798038103d269b633813fc60c"
    assert span.span_id == "eee19b7ec3c1b174"
    assert span.attributes["list"] == [3]
    assert span.resource == {"a": "b"}
    assert otlp.rewards_in([span])[0].value == -1.5


@pytest.mark.parametrize(
    ("body", "kind"), [(b"\xff\xff", "application/x-protobuf"), (b"{", "application/json")]
)
def test_what_is_not_otlp_is_refused(body: bytes, kind: str) -> None:
    with pytest.raises(ValueError, match="not an OTLP"):
        otlp.parse_traces(body, kind, "r1", "a1")


def test_a_reward_without_a_rollout_is_refused(collector: Collector) -> None:
    emit_reward(1.0)
    (_, kind, body) = collector.requests[0]
    with pytest.raises(ValueError, match="key of the rollout"):
        otlp.rewards_in(otlp.parse_traces(body, kind, None, None))
