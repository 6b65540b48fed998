"""Recorded calls, spans and rewards also reach an OTLP backend; an absent one delays nothing."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import httpx
import pytest
from gateway_client import post, reward_export, wait_until
from otlp_collector import Collector
from scripted_sampler import OPERATOR_KEY, Running

from agentrl_proxy.telemetry import otlp_export as forward
from agentrl_proxy.telemetry.otlp_export import OtlpExporter
from agentrl_tracer.otlp_codec import parse_traces


@pytest.fixture
def backend() -> Iterator[Collector]:
    with closing(Collector()) as server:
        yield server


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "_TIMEOUT_S", 3.0)
    monkeypatch.setattr(forward, "_CLOSE_S", 2.0)


def chat(gateway: Running) -> None:
    claim = gateway.claims[0]
    body = {"model": "policy", "messages": [{"role": "user", "content": "Hi"}]}
    traceparent = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01", "x-agentrl-agent": "player"}
    answer = post(
        f"{gateway.base_url(claim)}/chat/completions", claim.key, body, headers=traceparent
    )
    assert answer.status_code == 200


def test_spans_calls_and_rewards_are_forwarded(
    start: Callable[..., Running], backend: Collector
) -> None:
    gateway = start(forward=OtlpExporter(backend.url, {"x-project": "agentrl"}))
    claim = gateway.claims[0]
    backend.statuses = [503]  # retryable
    chat(gateway)
    base = gateway.base_url(claim)
    assert post(f"{base}/traces", claim.key, reward_export({"doubleValue": 0.5})).status_code == 200
    assert post(f"{base}/rewards", claim.key, {"value": 1}).status_code == 200
    wait_until(lambda: len(backend.spans) == 3)
    assert {(path, headers["x-project"]) for path, headers in backend.requests} == {
        ("/v1/traces", "agentrl")
    }
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


def test_a_dead_backend_costs_nothing_but_a_count(
    start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward, "_TIMEOUT_S", 0.3)
    forwarding = OtlpExporter("http://127.0.0.1:9")
    gateway = start(forward=forwarding)
    began = time.monotonic()
    chat(gateway)
    assert time.monotonic() - began < 10
    wait_until(lambda: forwarding.lost == 1)


def test_what_does_not_fit_is_counted(backend: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "_MAX_QUEUED", 10)
    backend.statuses = [400] * 100  # not retryable
    forwarding = OtlpExporter(backend.url)
    body = json.dumps(reward_export({"doubleValue": 1.0})).encode()
    spans = parse_traces(body, "application/json", "r", "a")
    for _ in range(50):
        forwarding.put(spans)
    forwarding.close()
    assert (forwarding.sent, forwarding.lost) == (0, 50)
    assert backend.spans == []
