"""Receive spans and rewards from agents: OTLP exports, and plain JSON rewards."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from agentrl_proxy.dependencies import TraceSink
from agentrl_proxy.errors import ApiError, attempt_sealed, forbidden, invalid, unavailable
from agentrl_proxy.protocols.fields import check_marks, read_object, shown
from agentrl_proxy.requests.recording import trace_context
from agentrl_proxy.server.large_requests import LargeRequests, is_large
from agentrl_proxy.server.sse import json_response
from agentrl_tracer.conventions import (
    ASIDE,
    REQUEST_ID,
    REWARD_NAME,
    SCORED,
    UNDELIVERED_SPAN,
    agent_of_reward,
)
from agentrl_tracer.half_characters import encodable_json
from agentrl_tracer.schemas import (
    POLICY_REWARD_KEY,
    REWARD_RANGE,
    AttemptRef,
    AttemptState,
    Reward,
    Span,
    is_reward,
)
from agentrl_tracer.store.faults import unexpected

log = logging.getLogger("agentrl.proxy")

_MAX_SPANS = 10_000  # in one export; OpenTelemetry's batches have 512
_MAX_REWARDS = 1_000


async def traces(
    writer: TraceSink,
    large: LargeRequests,
    attempt: AttemptRef | None,
    body: bytes,
    headers: Mapping[str, str],
) -> tuple[Response, list[str]]:
    """Store an OTLP/HTTP export. Reward spans become rewards of the caller's attempt.

    Returns:
        The response, and the ids of requests whose answers the agent's process did not get.
    """
    from agentrl_tracer.otlp_codec import parse_traces, rewards_in

    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in ("application/x-protobuf", "application/json"):
        allowed = "application/x-protobuf or application/json"
        message = f"content-type must be {allowed}; got {kind[:60]!r}"
        raise ApiError(415, message, code="unsupported_media_type")
    ids = (None, None) if attempt is None else (attempt.rollout_id, attempt.attempt_id)
    if kind == "application/json":
        check_marks(body)
    try:
        spans = await large.run(is_large(body), parse_traces, body, kind, *ids)
        if len(spans) > _MAX_SPANS:
            message = f"an export may have up to {_MAX_SPANS} spans; got {len(spans)}"
            raise ApiError(413, message, code="body_too_large")
        rewards = [] if attempt is None else rewards_in(spans)
    except ValueError as error:
        raise invalid(None, str(error), code="invalid_otlp") from None
    if spans:
        await _deliver(writer, attempt, spans, rewards)
    given_up = [
        str(span.attributes.get(REQUEST_ID)) for span in spans if span.name == UNDELIVERED_SPAN
    ]
    if kind == "application/json":
        return json_response({}), given_up
    # An empty ExportTraceServiceResponse.
    return Response(b"", media_type="application/x-protobuf"), given_up


async def reward(
    writer: TraceSink, attempt: AttemptRef | None, body: bytes, headers: Mapping[str, str]
) -> Response:
    """Store a JSON reward, one number or ``{name: number}``, for agents without OpenTelemetry.

    The header ``traceparent`` names the rewarded span, and ``idempotency-key`` the reward.
    """
    if attempt is None:
        raise forbidden("a reward needs its attempt's own key", "rollout_mismatch")
    fields = read_object(encodable_json(body))
    for field in ("name", "agent", "response_id", "explanation"):
        text = fields.get(field)
        if text is not None and not isinstance(text, str):
            raise invalid(field, f"{field} must be a string; got {shown(text)}")
        if "\0" in (text or ""):  # PostgreSQL stores none
            raise invalid(field, f"{field} must not contain NUL characters")
    value, key = fields.get("value"), headers.get("idempotency-key") or secrets.token_hex(16)
    if key == POLICY_REWARD_KEY or key.startswith((SCORED, ASIDE)):
        raise invalid("idempotency-key", f"idempotency-key: {shown(key)} is reserved; send another")
    named: dict[str, tuple[str, Any]] = {key: (fields.get("name") or REWARD_NAME, value)}
    if isinstance(value, dict):
        if len(value) > _MAX_REWARDS:
            raise invalid("value", f"value may have up to {_MAX_REWARDS} names; got {len(value)}")
        named = {f"{key}/{name}": (name, number) for name, number in value.items()}
    if not named or any("\0" in name for name, _ in named.values()):
        raise invalid("value", "value must be a number, or an object of numbers by name")
    for _, number in named.values():
        if type(number) not in (int, float) or not is_reward(number):
            raise invalid("value", f"{REWARD_RANGE}; got {shown(number)}")
    rewards = [
        Reward(
            attempt_id=attempt.attempt_id,
            rollout_id=attempt.rollout_id,
            name=name,
            value=float(number),
            key=reward_key,
            span_id=trace_context(headers)[1],
            response_id=fields.get("response_id"),
            explanation=fields.get("explanation"),
            agent=agent_of_reward(fields.get("agent")),
            created_at=time.time(),
        )
        for reward_key, (name, number) in named.items()
    ]
    await _deliver(writer, attempt, [], rewards)
    return json_response({"name": rewards[0].name, "value": value, "key": key})


async def _deliver(
    writer: TraceSink, attempt: AttemptRef | None, spans: list[Span], rewards: list[Reward]
) -> None:
    """Return once spans and rewards are durable."""
    try:
        state = await writer.deliver(attempt and attempt.attempt_id, spans, rewards)
    except Exception as error:
        said = "the store did not take %d spans, %d rewards: %s"
        log.error(said, len(spans), len(rewards), error, exc_info=unexpected(error))
        raise unavailable("spans and rewards could not be recorded", "store_error") from error
    if attempt is not None and state is not AttemptState.RUNNING:
        raise attempt_sealed(state)
