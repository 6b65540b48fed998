"""Convert OTLP trace exports, protobuf or JSON, to and from ``Span`` records.

Format: https://opentelemetry.io/docs/specs/otlp/.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterable
from typing import Any

from google.protobuf.json_format import ParseDict, ParseError
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
)

from agentrl_tracer.conventions import (
    EVALUATION_EXPLANATION,
    EVALUATION_NAME,
    EVALUATION_VALUE,
    RESPONSE_ID,
    REWARD_NAME,
    REWARD_SPAN,
)
from agentrl_tracer.schemas import Json, Reward, Span

_KINDS = ("unspecified", "internal", "server", "client", "producer", "consumer")
_STATUSES = ("unset", "ok", "error")
_MAX_TIME = 2**63 - 1  # the store's integers are signed


def parse_traces(
    body: bytes, content_type: str, rollout_id: str | None, attempt_id: str | None
) -> list[Span]:
    """Return the spans of an export request, assigned to this rollout and attempt.

    Raises:
        ValueError: the body is not OTLP.
    """
    request = _from_json(body) if "json" in content_type else _from_protobuf(body)
    return [
        _span(span, resource, rollout_id, attempt_id)
        for resource_spans in request.resource_spans
        for resource in [_attributes(resource_spans.resource.attributes)]
        for scope_spans in resource_spans.scope_spans
        for span in scope_spans.spans
    ]


def export_request(spans: Iterable[Span]) -> bytes:
    """Return the protobuf body of an export; ``agentrl.rollout.id`` names each span's rollout."""
    request = ExportTraceServiceRequest()
    scopes: dict[str, Any] = {}  # by resource
    for span in spans:
        resource = json.dumps(span.resource, sort_keys=True, default=str)
        if resource not in scopes:
            resource_spans = request.resource_spans.add()
            _set_attributes(resource_spans.resource.attributes, span.resource)
            scopes[resource] = resource_spans.scope_spans.add()
        _encode(span, scopes[resource].spans.add())
    return request.SerializeToString()


def _encode(span: Span, out: Any) -> None:
    out.trace_id = bytes.fromhex(span.trace_id)
    out.span_id = bytes.fromhex(span.span_id)
    out.parent_span_id = bytes.fromhex(span.parent_span_id or "")
    out.name = span.name
    out.kind = _KINDS.index(span.kind) if span.kind in _KINDS else 0
    out.start_time_unix_nano, out.end_time_unix_nano = span.start_ns, span.end_ns
    out.status.code = _STATUSES.index(span.status) if span.status in _STATUSES else 0
    owner = {"agentrl.rollout.id": span.rollout_id, "agentrl.attempt.id": span.attempt_id}
    _set_attributes(out.attributes, {k: v for k, v in owner.items() if v} | span.attributes)
    for event in span.events:
        added = out.events.add()
        added.name, added.time_unix_nano = event["name"], event["time_ns"]
        _set_attributes(added.attributes, event["attributes"])


def _set_attributes(pairs: Any, attributes: Json) -> None:
    for key, value in attributes.items():
        pair = pairs.add()
        pair.key = key
        _set_value(pair.value, value)


def _set_value(out: Any, value: Any) -> None:
    match value:
        case None:
            pass
        case bool():
            out.bool_value = value
        case int() if -(2**63) <= value < 2**63:
            out.int_value = value
        case float():
            out.double_value = value
        case list():
            out.array_value.SetInParent()
            for item in value:
                _set_value(out.array_value.values.add(), item)
        case dict():
            out.kvlist_value.SetInParent()
            _set_attributes(out.kvlist_value.values, value)
        case _:
            out.string_value = str(value)


def rewards_in(spans: Iterable[Span]) -> list[Reward]:
    """Return the rewards among spans.

    Raises:
        ValueError: a reward span without a finite number, or outside a rollout.
    """
    return [_reward(span) for span in spans if span.name == REWARD_SPAN]


def _reward(span: Span) -> Reward:
    value = span.attributes.get(EVALUATION_VALUE)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{EVALUATION_VALUE} must be a finite number, got {value!r}")
    if span.rollout_id is None or span.attempt_id is None:
        raise ValueError("a reward must come with the key of the rollout it is for")
    return Reward(
        attempt_id=span.attempt_id,
        rollout_id=span.rollout_id,
        name=_text(str(span.attributes.get(EVALUATION_NAME, REWARD_NAME))),
        value=float(value),
        key=span.span_id,
        span_id=span.parent_span_id,
        response_id=_optional_text(span, RESPONSE_ID),
        explanation=_optional_text(span, EVALUATION_EXPLANATION),
        created_at=span.start_ns / 1e9,
    )


def _optional_text(span: Span, name: str) -> str | None:
    value = span.attributes.get(name)
    return None if value is None else _text(str(value))


def _from_protobuf(body: bytes) -> ExportTraceServiceRequest:
    try:
        return ExportTraceServiceRequest.FromString(body)
    except DecodeError as error:
        raise ValueError(f"not an OTLP protobuf trace request: {error}") from error


def _from_json(body: bytes) -> ExportTraceServiceRequest:
    try:
        document = json.loads(body)
        _hex_ids_to_base64(document)
        return ParseDict(document, ExportTraceServiceRequest(), ignore_unknown_fields=True)
    except (ValueError, ParseError, TypeError, AttributeError, RecursionError) as error:
        # ParseDict raises many types.
        raise ValueError(f"not an OTLP JSON trace request: {error}") from error


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


def _text(text: str) -> str:
    """Replace NUL characters, which PostgreSQL does not store."""
    return text.replace("\0", "\ufffd")


def _span(span: Any, resource: Json, rollout_id: str | None, attempt_id: str | None) -> Span:
    return Span(
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_span_id=span.parent_span_id.hex() or None,
        name=_text(span.name),
        kind=_name(_KINDS, span.kind),
        start_ns=min(span.start_time_unix_nano, _MAX_TIME),
        end_ns=min(span.end_time_unix_nano, _MAX_TIME),
        status=_name(_STATUSES, span.status.code),
        attributes=_attributes(span.attributes),
        events=[
            {
                "name": event.name,
                "time_ns": event.time_unix_nano,
                "attributes": _attributes(event.attributes),
            }
            for event in span.events
        ],
        resource=resource,
        rollout_id=rollout_id,
        attempt_id=attempt_id,
    )


def _name(names: tuple[str, ...], number: int) -> str:
    return names[number] if 0 <= number < len(names) else str(number)


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
