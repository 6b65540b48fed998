"""``emit_reward``: the one call that an agent adds.

On the wire a reward is a zero-length span ``agentrl.reward`` that carries OpenTelemetry's
``gen_ai.evaluation.*`` attributes
(https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-events/#event-gen_aievaluationresult).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, SupportsFloat

from opentelemetry import trace

from agentrl_tracer.agent import logger, rollout_tracing
from agentrl_tracer.conventions import (
    EVALUATION_EXPLANATION,
    EVALUATION_NAME,
    EVALUATION_VALUE,
    RESPONSE_ID,
    REWARD_NAME,
    REWARD_SPAN,
)


def emit_reward(
    value: SupportsFloat | Mapping[str, SupportsFloat],
    *,
    name: str = REWARD_NAME,
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
        name: what is being rewarded, when it is not the whole.
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
    named = value if isinstance(value, Mapping) else {name: value}
    numbers = {key: _number(key, item) for key, item in named.items()}
    context = trace.set_span_in_context(span) if span is not None else active.parent()
    for key, number in numbers.items():
        marks = {**(attributes or {}), EVALUATION_NAME: key, EVALUATION_VALUE: number}
        if response_id is not None:
            marks[RESPONSE_ID] = response_id
        if explanation is not None:
            marks[EVALUATION_EXPLANATION] = explanation
        active.tracer.start_span(REWARD_SPAN, context, attributes=marks).end()
    if not active.attended and not active.flush():
        logger.warning(
            "agentrl: a reward or span did not reach the gateway; the rollout is retried"
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
