"""emit_reward: what arrives at the gateway, and what is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from opentelemetry import trace
from otlp_collector import Collector

from agentrl import emit, emit_reward
from agentrl_tracer import tracing
from agentrl_tracer.otlp_codec import rewards_in
from agentrl_tracer.schemas import Reward, is_reward


def rewards_of(collector: Collector) -> list[Reward]:
    return rewards_in([replace(s, rollout_id="r1", attempt_id="a1") for s in collector.spans])


def test_outside_a_rollout_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AGENTRL_ROLLOUT_ID", raising=False)
    emit_reward(1.0)
    emit_reward("nonsense")  # type: ignore[arg-type]
    assert tracing.flush()


def test_a_reward_arrives_before_emit_returns(collector: Collector) -> None:
    emit_reward(0.5, agent=" White\nplayer", explanation="half right", response_id="chatcmpl-1")
    [(path, headers)] = collector.requests
    assert headers["authorization"] == "Bearer secret"
    assert path == "/rollouts/r1/v1/traces"
    (reward,) = rewards_of(collector)
    assert (reward.name, reward.value) == ("reward", 0.5)
    assert reward.agent == "White player"  # as its requests' header has it
    assert (reward.response_id, reward.explanation) == ("chatcmpl-1", "half right")
    assert collector.spans[0].trace_id == "ab" * 16  # the runner's TRACEPARENT


def test_a_reward_belongs_to_the_current_span(collector: Collector) -> None:
    with tracing.tracing("agent"):
        span = trace.get_current_span().get_span_context()
        emit_reward({"style": 1, "truth": True})
    assert tracing.flush()
    rewards = rewards_of(collector)
    assert {(r.name, r.value) for r in rewards} == {("style", 1.0), ("truth", 1.0)}
    assert {r.span_id for r in rewards} == {f"{span.span_id:016x}"}
    root = next(s for s in collector.spans if s.name == "agent")
    assert root.parent_span_id == "cd" * 8


class Odd:
    def __float__(self) -> float:
        raise RuntimeError

    __repr__ = __str__ = __float__  # type: ignore[assignment]


@pytest.mark.parametrize(
    "value", [math.nan, -math.inf, 1e10, 10**400, "1", None, b"1", object(), Odd()]
)
def test_what_is_no_reward_arrives_refused_and_raises_nothing(
    collector: Collector, caplog: pytest.LogCaptureFixture, value: Any
) -> None:
    emit_reward({"good": 1, "odd": value})
    good, odd = rewards_of(collector)
    assert (good.value, good.explanation) == (1.0, None)
    assert not is_reward(odd.value)
    assert (odd.explanation or "").startswith("refused: 'odd' got ")
    assert "the rollout will not train" in caplog.text


def test_an_undelivered_reward_is_noticed(
    collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    collector.status = 400  # not retried by the exporter
    emit_reward(1.0)
    assert not tracing.flush()
    assert "did not reach the gateway" in caplog.text


def test_half_a_character_loses_nothing(collector: Collector) -> None:
    """A model's JSON that was cut within an escape decodes to one."""
    half = json.loads(r'"cut \ud83d"')

    def agent() -> None:
        with tracing.tracing("agent"):
            emit_reward(1.0, explanation=half)
            emit("note", half)
            raise ValueError(half + "x" * 9_000_000)

    with pytest.raises(ValueError, match="cut"):
        agent()
    assert tracing.flush()
    assert [reward.explanation for reward in rewards_of(collector)] == ["cut ?"]
    spans = {span.name: span for span in collector.spans}
    assert spans["agentrl.note"].attributes["agentrl.note.data"] == '"cut ?"'
    assert spans["agent"].status == "error"
