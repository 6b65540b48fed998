"""OTLP exports to records and back."""

from __future__ import annotations

import json

import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans

from agentrl_tracer.otlp_codec import parse_traces, readable_span, rewards_in
from agentrl_tracer.schemas import Span

SPAN = {
    "traceId": "5b8efff798038103d269b633813fc60c",
    "spanId": "eee19b7ec3c1b174",
    "name": "agentrl.reward",
    "startTimeUnixNano": "1544712660000000000",
    "endTimeUnixNano": "1544712660000000000",
    "attributes": [
        {"key": "gen_ai.evaluation.score.value", "value": {"doubleValue": -1.5}},
        {"key": "list", "value": {"arrayValue": {"values": [{"intValue": "3"}]}}},
    ],
}
RESOURCE = {"attributes": [{"key": "a", "value": {"stringValue": "b"}}]}
EXPORT = {"resourceSpans": [{"resource": RESOURCE, "scopeSpans": [{"spans": [SPAN]}]}]}


def test_otlp_json_ids_are_hex() -> None:
    (span,) = parse_traces(json.dumps(EXPORT).encode(), "application/json", "r1", "a1")
    assert (span.trace_id, span.span_id) == (SPAN["traceId"], SPAN["spanId"])
    assert (span.attributes["list"], span.resource) == ([3], {"a": "b"})
    assert rewards_in([span])[0].value == -1.5


def test_half_a_character_in_json_is_replaced() -> None:
    """As JavaScript writes what it cut in an emoji."""
    span = {"traceId": "ab" * 16, "spanId": "cd" * 8, "name": "cut \ud83d, whole \U0001f600"}
    body = json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}).encode()
    [parsed] = parse_traces(body, "application/json", "r", "a")
    assert parsed.name == "cut ?, whole \U0001f600"


def test_a_reward_without_a_rollout_is_refused() -> None:
    spans = parse_traces(json.dumps(EXPORT).encode(), "application/json", None, None)
    with pytest.raises(ValueError, match="key of the rollout"):
        rewards_in(spans)


@pytest.mark.parametrize(
    ("body", "kind"), [(b"\xff\xff", "application/x-protobuf"), (b"{", "application/json")]
)
def test_other_bodies_are_refused(body: bytes, kind: str) -> None:
    with pytest.raises(ValueError, match="not an OTLP"):
        parse_traces(body, kind, "r1", "a1")


def test_spans_survive_a_round_trip() -> None:
    values = [True, 3, -1.5, "text", [1, ["a"]], {"x": {"y": [2]}}]
    span = Span(
        "ab" * 16, "cd" * 8, "ef" * 8, "name", "client", 1, 2, "error",
        {str(i): value for i, value in enumerate(values)},
        [{"name": "event", "time_ns": 5, "attributes": {"a": 1}}], {"service.name": "s"}, "r", "a",
    )  # fmt: skip
    body = encode_spans([readable_span(span)]).SerializeToString()
    [back] = parse_traces(body, "application/x-protobuf", "r", "a")
    assert back.attributes.pop("agentrl.rollout.id") == "r"
    assert back.attributes.pop("agentrl.attempt.id") == "a"
    assert back == span
