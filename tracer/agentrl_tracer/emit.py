"""``emit_reward``: the one call that an agent adds. And ``emit``, for notes.

On the wire a reward is a zero-length span ``agentrl.reward`` that carries OpenTelemetry's
``gen_ai.evaluation.*`` attributes
(https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-events/#event-gen_aievaluationresult).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, SupportsFloat

from opentelemetry import trace

from agentrl_tracer.context import current_rollout
from agentrl_tracer.conventions import (
    EVALUATION_EXPLANATION,
    EVALUATION_NAME,
    EVALUATION_VALUE,
    NOTE_DATA,
    NOTE_NAME,
    NOTE_SPAN,
    RESPONSE_ID,
    REWARD_NAME,
    REWARD_SPAN,
)
from agentrl_tracer.provider import RolloutTracing, logger, rollout_tracing


def emit_reward(
    value: SupportsFloat | Mapping[str, SupportsFloat],
    *,
    name: str | None = None,
    span: trace.Span | None = None,
    response_id: str | None = None,
    explanation: str | None = None,
    attributes: Mapping[str, Any] | None = None,
) -> None:
    """Rewards the rollout that is running; outside training this does nothing.

    Several rewards of a rollout add up. In the process that a runner started the reward leaves in
    the background, within half a second, and the rollout does not succeed before it has arrived;
    in a subprocess of the agent this returns when it has arrived.

    Args:
        value: a finite number (a bool counts as 1 or 0), or ``{name: number}`` for several at once.
        name: what is being rewarded, when it is not the whole; "reward" by default.
        span: the span to reward; the current one by default.
        response_id: the model answer to reward (``response.id`` of the OpenAI client).
        explanation: why, for whoever reads the trace.
        attributes: more attributes for the span.

    Raises:
        ValueError: inside a rollout, when the value is NaN, infinite or no number.
    """
    active = rollout_tracing()
    if active is None:
        return
    named = value if isinstance(value, Mapping) else {name or REWARD_NAME: value}
    numbers = {key: _number(key, item) for key, item in named.items()}
    context = trace.set_span_in_context(span) if span is not None else active.parent()
    for key, number in numbers.items():
        marks = {**(attributes or {}), EVALUATION_NAME: key, EVALUATION_VALUE: number}
        if response_id is not None:
            marks[RESPONSE_ID] = response_id
        if explanation is not None:
            marks[EVALUATION_EXPLANATION] = explanation
        active.tracer.start_span(REWARD_SPAN, context, attributes=marks).end()
    _deliver(active)


def emit(name: str, data: Any = None, *, span: trace.Span | None = None) -> None:
    """Leaves a note in the rollout's trace; outside training this does nothing.

    Args:
        name: what it is about.
        data: anything that JSON can say; what it cannot say is noted as text.
        span: the span it belongs to; the current one by default.

    Raises:
        ValueError: inside a rollout, when the name is no text or empty.
    """
    active = rollout_tracing()
    if active is None:
        return
    if not isinstance(name, str) or not name:
        raise ValueError(f"emit: the name must be a non-empty string, got {name!r}")
    context = trace.set_span_in_context(span) if span is not None else active.parent()
    marks = {NOTE_NAME: name, NOTE_DATA: json.dumps(data, default=str, ensure_ascii=False)}
    active.tracer.start_span(NOTE_SPAN, context, attributes=marks).end()
    _deliver(active)


def _deliver(active: RolloutTracing) -> None:
    """In a subprocess nobody flushes at the end: what was emitted leaves at once."""
    rollout = current_rollout()
    assert rollout is not None
    if not active.attended(rollout) and not active.flush(rollout):
        logger.warning(
            "agentrl: a reward, note or span did not reach the gateway; the rollout is retried"
        )


def _number(name: str, value: Any) -> float:
    problem = f"emit_reward: {name!r} got {value!r} ({type(value).__name__}); give a finite number"
    if isinstance(value, str | bytes):
        raise ValueError(problem)
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError(problem) from None
    if not math.isfinite(number):
        raise ValueError(problem)
    return number
