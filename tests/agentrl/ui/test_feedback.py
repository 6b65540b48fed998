"""Feedback of people: kept beside what agents emit, and a reward only where it is named."""

from __future__ import annotations

from call_records import call_of, reward, rollout

from agentrl_tracer.schemas import Feedback
from agentrl_trainer.data.adapter_split import AdapterRule
from agentrl_trainer.data.rewards import human_rewards, rollout_reward

ROLLOUT = rollout("r")


def given(author: str, at: float, score: float, **more: object) -> Feedback:
    call_id = str(more["call_id"]) if "call_id" in more else None
    return Feedback("run", "r", call_id, "quality", author, score=score, created_at=at)


def test_each_persons_newest_score_counts_and_the_mean_is_the_reward() -> None:
    feedback = [given("a", 2, 1.0), given("b", 1, 0.5), given("a", 1, -1.0)]
    [found] = human_rewards(feedback, [ROLLOUT], [], {"human:quality"})
    assert (found.name, found.value) == ("human:quality", 0.75)
    assert rollout_reward(ROLLOUT, [reward("r", 1.0), found]) == 1.75


def test_feedback_that_no_adapter_names_is_no_reward() -> None:
    assert human_rewards([given("a", 1, 1.0)], [ROLLOUT], [], {"human:other"}) == []
    [found] = human_rewards([given("a", 1, 1.0)], [ROLLOUT], [], {"human:quality"})
    assert not AdapterRule().counts(found)
    assert AdapterRule(rewards=["human:quality"]).counts(found)


def test_feedback_on_a_call_belongs_to_its_turn() -> None:
    call = call_of("r", "c1")
    feedback = [given("a", 1, 1.0, call_id="c1")]
    [found] = human_rewards(feedback, [ROLLOUT], [call], {"human:quality"})
    assert (found.response_id, found.attempt_id) == ("c1", "r-a")
