"""Convert OTLP trace exports, protobuf or JSON, to ``Span`` records, and records to SDK spans.

Format: https://opentelemetry.io/docs/specs/otlp/.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from google.protobuf.json_format import ParseDict, ParseError
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode

from agentrl_tracer import conventions as wire
from agentrl_tracer.conventions import agent_of_reward
from agentrl_tracer.half_characters import encodable_json
from agentrl_tracer.schemas import REWARD_RANGE, Json, Reward, Span, is_reward

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

_KINDS = dict(enumerate(("unspecified", "internal", "server", "client", "producer", "consumer")))
_STATUSES = dict(enumerate(("unset", "ok", "error")))
_MAX_TIME = 2**63 - 1  # the store's integers are signed


def parse_traces(
    body: bytes, content_type: str, rollout_id: str | None, attempt_id: str | None
) -> list[Span]:
    """Return the spans of an export request, assigned to this rollout and attempt.

    Raises:
        ValueError: the body is not OTLP.
    """
    try:
        if "json" in content_type:
            document = json.loads(encodable_json(body))
            _hex_ids_to_base64(document)
            request = ParseDict(document, ExportTraceServiceRequest(), ignore_unknown_fields=True)
        else:
            request = ExportTraceServiceRequest.FromString(body)
    except (ValueError, ParseError, DecodeError, TypeError, AttributeError, RecursionError) as why:
        raise ValueError(f"not an OTLP trace request: {why}") from why  # ParseDict raises many
    return [
        _span(span, resource, rollout_id, attempt_id)
        for resource_spans in request.resource_spans
        for resource in [_attributes(resource_spans.resource.attributes)]
        for scope_spans in resource_spans.scope_spans
        for span in scope_spans.spans
    ]


def readable_span(span: Span) -> ReadableSpan:
    """Convert a record to a span that OpenTelemetry's exporters take.

    ``agentrl.rollout.id`` and ``agentrl.attempt.id`` name its rollout and attempt.
    """
    from opentelemetry.sdk.resources import Resource  # megabytes, which a parser does not need
    from opentelemetry.sdk.trace import Event, ReadableSpan

    owner = {"agentrl.rollout.id": span.rollout_id, "agentrl.attempt.id": span.attempt_id}
    trace_id, parent_id = int(span.trace_id, 16), int(span.parent_span_id or "0", 16)
    parent = SpanContext(trace_id, parent_id, is_remote=True) if parent_id else None
    return ReadableSpan(
        span.name,
        context=SpanContext(trace_id, int(span.span_id, 16), is_remote=False),
        parent=parent,
        resource=Resource(_known(span.resource)),
        attributes=_known(owner) | _known(span.attributes),
        events=[Event(e["name"], _known(e["attributes"]), e["time_ns"]) for e in span.events],
        kind=SpanKind.__members__.get(span.kind.upper(), SpanKind.INTERNAL),
        status=Status(StatusCode.__members__.get(span.status.upper(), StatusCode.UNSET)),
        start_time=span.start_ns,
        end_time=span.end_ns,
    )


def _known(attributes: Json) -> Json:
    return {name: value for name, value in attributes.items() if value is not None}


def rewards_in(spans: Iterable[Span]) -> list[Reward]:
    """Return the rewards among spans.

    Those without a number have an infinite value, which does not train, and say so.

    Raises:
        ValueError: a reward span is outside a rollout.
    """
    return [_reward(span) for span in spans if span.name == wire.REWARD_SPAN]


def _reward(span: Span) -> Reward:
    value = span.attributes.get(wire.EVALUATION_VALUE)
    explanation = _text(span.attributes.get(wire.EVALUATION_EXPLANATION))
    number = math.inf if isinstance(value, bool) or not isinstance(value, int | float) else value
    if not is_reward(number):
        explanation = explanation or f"refused: got {value!r:.80}, and {REWARD_RANGE}"
    if span.rollout_id is None or span.attempt_id is None:
        raise ValueError("a reward must come with the key of the rollout it is for")
    return Reward(
        attempt_id=span.attempt_id,
        rollout_id=span.rollout_id,
        name=_text(span.attributes.get(wire.EVALUATION_NAME)) or wire.REWARD_NAME,
        value=float(number),
        key=span.span_id,
        span_id=span.parent_span_id,
        response_id=_text(span.attributes.get(wire.RESPONSE_ID)),
        explanation=explanation,
        agent=agent_of_reward(_text(span.attributes.get(wire.AGENT_NAME))),
        created_at=span.start_ns / 1e9,
    )


def _hex_ids_to_base64(node: Any) -> None:
    """Convert ids: OTLP/JSON writes them in hex, and protobuf's JSON would decode base64."""
    if isinstance(node, dict):
        for key, value in node.items():
            if key in ("traceId", "spanId", "parentSpanId") and isinstance(value, str):
                node[key] = base64.b64encode(bytes.fromhex(value)).decode()
            else:
                _hex_ids_to_base64(value)
    elif isinstance(node, list):
        for item in node:
            _hex_ids_to_base64(item)


def _text(value: object) -> str | None:
    """Replace NUL characters, which PostgreSQL does not store."""
    return None if value is None else str(value).replace("\0", "\ufffd")


def _span(span: Any, resource: Json, rollout_id: str | None, attempt_id: str | None) -> Span:
    return Span(
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_span_id=span.parent_span_id.hex() or None,
        name=_text(span.name) or "",
        kind=_KINDS.get(span.kind, str(span.kind)),
        start_ns=min(span.start_time_unix_nano, _MAX_TIME),
        end_ns=min(span.end_time_unix_nano, _MAX_TIME),
        status=_STATUSES.get(span.status.code, str(span.status.code)),
        attributes=_attributes(span.attributes),
        events=[
            {"name": e.name, "time_ns": e.time_unix_nano, "attributes": _attributes(e.attributes)}
            for e in span.events
        ],
        resource=resource,
        rollout_id=rollout_id,
        attempt_id=attempt_id,
    )


def _attributes(pairs: Iterable[Any]) -> Json:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    match value.WhichOneof("value"):
        case None:
            return None
        case "array_value":
            return [_value(item) for item in value.array_value.values]
        case "kvlist_value":
            return _attributes(value.kvlist_value.values)
        case "bytes_value":
            return base64.b64encode(value.bytes_value).decode()
        case "double_value" if not math.isfinite(value.double_value):
            return str(value.double_value)  # JSON has no such number
        case kind:
            return getattr(value, kind)
