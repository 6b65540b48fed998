"""What an attempt tells about itself: OTLP spans and rewards.

Knows how they reach the store. Does not know models or tokens.
"""

from __future__ import annotations

import logging
import math
import secrets
import time

from starlette.responses import Response

from agentrl_proxy.dependencies import TraceSink
from agentrl_proxy.errors import ApiError, attempt_sealed, forbidden, invalid, unavailable
from agentrl_proxy.protocols.fields import read_object
from agentrl_proxy.requests.auth import Caller
from agentrl_proxy.server.sse import json_response
from agentrl_tracer.conventions import REWARD_NAME
from agentrl_tracer.schemas import AttemptRef, AttemptState, Reward, Span

log = logging.getLogger("agentrl.proxy")


async def traces(writer: TraceSink, caller: Caller, body: bytes, content_type: str) -> Response:
    """An OTLP/HTTP export. Spans that carry rewards become rewards of their attempt."""
    from agentrl_tracer.otlp_codec import parse_traces, rewards_in

    kind = content_type.partition(";")[0].strip().lower()
    if kind not in ("application/x-protobuf", "application/json"):
        allowed = "application/x-protobuf or application/json"
        raise ApiError(415, f"content-type must be {allowed}; got {kind[:60]!r}",
                       code="unsupported_media_type")  # fmt: skip
    attempt = caller.attempt
    rollout_id = None if attempt is None else attempt.rollout_id
    attempt_id = None if attempt is None else attempt.attempt_id
    try:
        spans = parse_traces(body, content_type, rollout_id, attempt_id)
        rewards = [] if attempt is None else rewards_in(spans)
    except ValueError as error:
        raise invalid(None, str(error), code="invalid_otlp") from None
    if spans:
        await _deliver(writer, attempt, spans, rewards)
    if kind == "application/json":
        return json_response({})
    return Response(b"", media_type="application/x-protobuf")  # an empty ExportTraceServiceResponse


async def reward(
    writer: TraceSink,
    caller: Caller,
    body: bytes,
    idempotency_key: str | None,
    span_id: str | None = None,
) -> Response:
    """A reward, or ``{name: number}`` for several, by plain JSON: for agents without OpenTelemetry.

    Args:
        span_id: the span it is for, from the request's ``traceparent``.
    """
    attempt = caller.attempt
    if attempt is None:
        raise forbidden("a reward needs its attempt's own key", "rollout_mismatch")
    fields = read_object(body)
    texts: dict[str, str | None] = {}
    for name in ("name", "response_id", "explanation"):
        texts[name] = fields.get(name)
        if texts[name] is not None and not isinstance(texts[name], str):
            raise invalid(name, f"{name} must be a string; got {fields[name]!r:.80}")
        if "\0" in (texts[name] or ""):  # PostgreSQL takes none
            raise invalid(name, f"{name} must not contain NUL characters")
    value, key = fields.get("value"), idempotency_key or secrets.token_hex(16)
    named = (
        {f"{key}/{name}": (name, one) for name, one in value.items()}
        if isinstance(value, dict)
        else {key: (texts["name"] or REWARD_NAME, value)}
    )
    records = [
        Reward(
            attempt_id=attempt.attempt_id,
            rollout_id=attempt.rollout_id,
            name=name,
            value=_number(one),
            key=record_key,
            span_id=span_id,
            response_id=texts["response_id"],
            explanation=texts["explanation"],
            created_at=time.time(),
        )
        for record_key, (name, one) in named.items()
    ]
    if not records or any("\0" in record.name for record in records):
        raise invalid("value", "value must be a number, or an object of numbers by name")
    await _deliver(writer, attempt, [], records)
    return json_response({"name": records[0].name, "value": value, "key": key})


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise invalid("value", f"value must be a finite number; got {value!r:.80}")
    return float(value)


async def _deliver(
    writer: TraceSink, attempt: AttemptRef | None, spans: list[Span], rewards: list[Reward]
) -> None:
    """Returns when they are durable."""
    try:
        state = await writer.deliver(attempt and attempt.attempt_id, spans, rewards)
    except Exception as error:
        log.exception("the store did not take %d spans, %d rewards", len(spans), len(rewards))
        raise unavailable("spans and rewards could not be recorded", "store_error") from error
    if attempt is not None and state is not AttemptState.RUNNING:
        raise attempt_sealed(state)
