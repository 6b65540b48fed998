"""Spans and rewards: what an attempt tells about itself."""

from __future__ import annotations

import gzip
import json
from typing import Any

import httpx
import pytest
from gateway_client import HTTP, error_of, post, reward_export
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from scripted_sampler import OPERATOR_KEY, Running

from agentrl_tracer.schemas import is_reward


@pytest.mark.parametrize("compression", [Compression.NoCompression, Compression.Gzip])
def test_spans_of_the_real_exporter(gateway: Running, compression: Compression) -> None:
    claim = gateway.claims[0]
    exporter = OTLPSpanExporter(
        endpoint=f"{gateway.base_url(claim)}/traces",
        headers={"authorization": f"Bearer {claim.key}"},
        compression=compression,
    )
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with provider.get_tracer("test").start_as_current_span("chat") as span:
        span.set_attribute("gen_ai.agent.name", "player")
    provider.shutdown()
    [kept] = gateway.store.spans(claim.rollout_id)
    assert (kept.name, kept.attempt_id) == ("chat", claim.attempt_id)
    assert kept.attributes == {"gen_ai.agent.name": "player"}
    assert kept.trace_id == f"{span.get_span_context().trace_id:032x}"


def test_a_reward_span_is_a_reward_once(gateway: Running) -> None:
    claim = gateway.claims[0]
    url = f"{gateway.base_url(claim)}/traces"
    headers = {"authorization": f"Bearer {claim.key}", "content-type": "application/json"}
    body = json.dumps(reward_export({"doubleValue": 0.5})).encode()
    for content, more in ((body, {}), (gzip.compress(body), {"content-encoding": "gzip"})):
        response = httpx.post(url, content=content, headers=headers | more)
        assert response.status_code == 200
        assert response.json() == {}
    [reward] = gateway.store.rewards([claim.rollout_id])
    assert (reward.value, reward.attempt_id) == (0.5, claim.attempt_id)


@pytest.mark.parametrize(
    "value", [{"boolValue": True}, {"stringValue": "1"}, {}, {"doubleValue": "NaN"}]
)
def test_a_bad_reward_span_is_kept_as_a_refused_reward(gateway: Running, value: Any) -> None:
    """It may come with spans and rewards that are right."""
    claim = gateway.claims[0]
    response = post(f"{gateway.base_url(claim)}/traces", claim.key, reward_export(value))
    assert response.status_code == 200
    [reward] = gateway.store.rewards([claim.rollout_id])
    assert not is_reward(reward.value)
    assert "refused: got" in (reward.explanation or "")


def test_rewards_by_json(gateway: Running) -> None:
    mine, other = gateway.claims[:2]
    url = f"{gateway.base_url(mine)}/rewards"
    assert post(url, mine.key, {"value": 1}).status_code == 200
    body = {"value": -0.5, "name": "style", "response_id": "chatcmpl-1", "explanation": "terse"}
    headers = {"idempotency-key": "k", "traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"}
    for _ in range(2):  # delivered twice, counted once
        response = post(url, mine.key, body, headers=headers)
        assert response.status_code == 200
    assert post(url, other.key, {"value": 9}).status_code == 403
    assert post(url, OPERATOR_KEY, {"value": 9}).status_code == 403
    first, second = gateway.store.rewards([mine.rollout_id, other.rollout_id])
    assert (first.name, first.value) == ("reward", 1.0)
    assert (second.name, second.value, second.response_id) == ("style", -0.5, "chatcmpl-1")
    assert (first.span_id, second.span_id) == (None, "cd" * 8)
    several = {"value": {"style": 1, "truth": 0.5}}
    assert post(gateway.base_url(other) + "/rewards", other.key, several).status_code == 200
    rewards = gateway.store.rewards([other.rollout_id])
    assert sorted((one.name, one.value) for one in rewards) == [("style", 1.0), ("truth", 0.5)]
    cut = gateway.claims[2]  # JavaScript's slice(0, n) of a text with an emoji
    response = HTTP.post(
        gateway.base_url(cut) + "/rewards",
        content=json.dumps({"value": 1, "explanation": "fine \ud83d"}),
        headers={"authorization": f"Bearer {cut.key}"},
    )
    assert response.status_code == 200
    [reward] = gateway.store.rewards([cut.rollout_id])
    assert reward.explanation == "fine ?"


@pytest.mark.parametrize("key", ["policy", "scored:exact:exact", "aside:scored:exact:exact"])
def test_an_agent_cannot_give_the_rewards_of_others(gateway: Running, key: str) -> None:
    claim = gateway.claims[0]
    body, headers = {"value": 1, "name": "exact"}, {"idempotency-key": key}
    response = post(f"{gateway.base_url(claim)}/rewards", claim.key, body, headers=headers)
    assert (response.status_code, error_of(response)["param"]) == (400, "idempotency-key")
    assert gateway.store.rewards([claim.rollout_id]) == []


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ('{"value": true}', "value"),
        ('{"value": {}}', "value"),
        ('{"value": {"a": 1, "b": null}}', "value"),
        ('{"value": "1"}', "value"),
        ('{"value": 1e999}', "value"),
        ('{"value": 1e10}', "value"),
        ("{}", "value"),
        ('{"value": 1, "name": 3}', "name"),
    ],
)
def test_a_bad_reward_is_refused(gateway: Running, body: str, param: str) -> None:
    claim = gateway.claims[0]
    response = httpx.post(
        f"{gateway.base_url(claim)}/rewards",
        content=body,
        headers={"authorization": f"Bearer {claim.key}"},
    )
    assert response.status_code == 400
    error = error_of(response)
    assert error["param"] in (param, None)  # 1e999 is no JSON number to some parsers
    assert gateway.store.rewards([claim.rollout_id]) == []
