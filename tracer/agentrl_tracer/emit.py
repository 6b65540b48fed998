"""Emit rewards and notes from the agent: ``emit_reward`` and ``emit``.

On the wire a reward is a zero-length span ``agentrl.reward`` with OpenTelemetry's
``gen_ai.evaluation.*`` attributes
(https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-events/#event-gen_aievaluationresult).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, SupportsFloat

from opentelemetry import trace

from agentrl_tracer import conventions as wire
from agentrl_tracer.half_characters import encodable
from agentrl_tracer.schemas import REWARD_RANGE, is_reward
from agentrl_tracer.tracing import AttemptTracing, logger, rollout_tracing

_LONGEST_NOTE = 450_000  # characters; their JSON has at most LONGEST_ATTRIBUTE


def emit_reward(
    value: SupportsFloat | Mapping[str, SupportsFloat],
    *,
    name: str | None = None,
    agent: str | None = None,
    span: trace.Span | None = None,
    response_id: str | None = None,
    explanation: str | None = None,
    attributes: Mapping[str, Any] | None = None,
) -> None:
    """Reward the running rollout. Outside training this does nothing.

    Rewards of a rollout add up. In the process that a runner started, the reward leaves in the
    background within half a second, and the rollout does not succeed before it has arrived. In a
    subprocess of the agent this returns when the reward has arrived.

    Args:
        value: a number from -1e9 to 1e9 (a bool counts as 1 or 0), or ``{name: number}`` for
            several. Any other value is refused: a warning says so, the trace shows it, and the
            rollout does not train (``refused_reward``). Nothing is raised in the agent.
        name: what the number measures; "reward" by default.
        agent: the agent (role) that earned it, as its calls name it: the reward then counts for
            the calls of this agent only, which are compared with those of the same agent in other
            rollouts of the task. By default it counts for all calls.
        span: the span to reward; the current one by default.
        response_id: the model answer to reward (``response.id`` of the OpenAI client).
        explanation: the reason, shown in the trace.
        attributes: more attributes for the span.
    """
    attempt = rollout_tracing()
    if attempt is None:
        return
    named = value if isinstance(value, Mapping) else {name or wire.REWARD_NAME: value}
    optional = {
        wire.AGENT_NAME: agent,
        wire.RESPONSE_ID: response_id,
        wire.EVALUATION_EXPLANATION: explanation,
    }
    common = {**(attributes or {}), **{k: v for k, v in optional.items() if v is not None}}
    rewards = [
        {**common, wire.EVALUATION_NAME: str(key), **_number(str(key), item)}
        for key, item in named.items()
    ]
    _emit_spans(attempt, wire.REWARD_SPAN, span, rewards)


def emit(name: str, data: Any = None, *, span: trace.Span | None = None) -> None:
    """Leave a note in the rollout's trace. Outside training this does nothing.

    Args:
        name: the note's name.
        data: any JSON value; other values are noted as text. Of more than 450,000 characters of
            JSON the beginning is kept, as text.
        span: the span that the note belongs to; the current one by default.
    """
    attempt = rollout_tracing()
    if attempt is None:
        return
    try:
        text = json.dumps(data, default=str, ensure_ascii=False)
    except Exception:  # a cycle, a key that is no string, or any object's own ``__str__``
        text = json.dumps(object.__repr__(data))
    if (length := len(text)) > _LONGEST_NOTE:
        cut = f"{text[:_LONGEST_NOTE]} (cut: {length:,} characters)"
        text = json.dumps(cut, ensure_ascii=False)
    note = {wire.NOTE_NAME: str(name) or "note", wire.NOTE_DATA: text}
    _emit_spans(attempt, wire.NOTE_SPAN, span, [note])


def _emit_spans(
    attempt: AttemptTracing, name: str, under: trace.Span | None, spans: list[dict[str, Any]]
) -> None:
    router = attempt.router
    context = router.parent() if under is None else trace.set_span_in_context(under)
    for attributes in spans:
        for key, value in attributes.items():
            if isinstance(value, str):
                attributes[key] = encodable(value)
        router.tracer.start_span(name, context, attributes=attributes).end()
    # In a subprocess ``finish`` is not called: flush at once.
    if not attempt.finish_expected and not attempt.flush():
        logger.warning(
            "agentrl: a reward, note or span did not reach the gateway; the rollout is retried"
        )


def _number(name: str, value: Any) -> dict[str, Any]:
    """Return the attributes of a value. What is no reward leaves as it is, or as NaN."""
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except Exception:  # of any object's own ``__float__``
        number = math.nan
    if is_reward(number):
        return {wire.EVALUATION_VALUE: number}
    got = repr(value)[:80] if isinstance(value, str | bytes) else number
    why = f"refused: {name!r} got {got} ({type(value).__name__}), and {REWARD_RANGE}"
    logger.warning("agentrl: emit_reward: %s; the rollout will not train", why)
    return {wire.EVALUATION_VALUE: number, wire.EVALUATION_EXPLANATION: why}
