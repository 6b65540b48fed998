"""Every call of a step gets one verdict: trained, or skipped with a reason."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl_tracer.schemas import (
    Call,
    CallState,
    Purpose,
    Reward,
    Rollout,
    RolloutState,
    SkipReason,
)
from agentrl_trainer.data.batch_assembly import StepSettings, assemble

SETTINGS = StepSettings(adapters=frozenset({"policy"}), max_length=64)


def rollout(name: str, group: str = "g", state: RolloutState = RolloutState.SUCCEEDED) -> Rollout:
    winner = f"{name}-a" if state is RolloutState.SUCCEEDED else None
    return Rollout(
        name, "run", "task", group, Purpose.TRAIN, 1, 0, 0, state, None, 1, winner, 0.0, 0.0, 0.0
    )


def call(of: str, name: str, attempt: str = "a", seq: int = 0) -> Call:
    return Call(
        id=name, response_id=name, choice=0, run_id="run", rollout_id=of,
        attempt_id=f"{of}-{attempt}", seq=seq, agent=None, model="policy", adapter="policy",
        adapter_version=0, state=CallState.COMPLETED, prompt_ids=[1, 2, seq + 3],
        response_ids=[7, 8], response_logprobs=[-0.5, -0.25], finish_reason="stop", params={},
        request=None, response=None, error=None, trace_id=None, span_id=None, started_at=0.0,
        ended_at=1.0,
    )  # fmt: skip


def reward(of: str, value: float, attempt: str = "a") -> Reward:
    return Reward(f"{of}-{attempt}", of, "reward", value, key=f"{of}{attempt}{value}")


def test_advantages_reach_the_sampled_tokens() -> None:
    rollouts = [rollout("r1"), rollout("r2")]
    batch = assemble(
        rollouts, [call("r1", "c1"), call("r2", "c2")], [reward("r1", 1), reward("r2", 0)], SETTINGS
    )
    assert batch.trained == {"c1", "c2"}
    assert [d.advantages for d in batch.rows] == [
        [0, 0, 0, 0.5, 0.5],
        [0, 0, 0, -0.5, -0.5],
    ]
    assert batch.metrics()["reward/mean"] == 0.5


@pytest.mark.parametrize("estimator", ["grpo", "reinforce", "turn", "gigpo", "gae"])
def test_the_reasons_of_skipped_groups_add_up(estimator: str) -> None:
    """Also of a group in which nobody earned anything, and of one that has shrunk to a member."""
    earned = {"used": (1, 0), "alike": (0, 0), "shrunk": (1, None), "silent": (None, None)}
    rollouts = [rollout(f"{group}{i}", group) for group in earned for i in range(2)]
    calls = [call(one.id, f"c-{one.id}") for one in rollouts]
    rewards = [
        reward(f"{group}{i}", value)
        for group, values in earned.items()
        for i, value in enumerate(values)
        if value is not None
    ]
    found = assemble(rollouts, calls, rewards, replace(SETTINGS, estimator=estimator)).metrics()
    reasons = {name: found[f"groups/{name}"] for name in ("small_group", "zero_advantage")}
    assert found["groups/no_reward"] == 1
    assert found["groups/skipped"] == sum(reasons.values()) + 1
    if estimator in ("grpo", "turn", "gigpo"):
        assert reasons == {"small_group": 1, "zero_advantage": 1}


def test_only_the_winning_attempt_trains_and_earns() -> None:
    rollouts = [rollout("r1"), rollout("r2")]
    calls = [call("r1", "lost", attempt="b"), call("r1", "won"), call("r2", "c2")]
    rewards = [reward("r1", 5, attempt="b"), reward("r1", 1), reward("r2", 0)]
    batch = assemble(rollouts, calls, rewards, SETTINGS)
    assert batch.trained == {"won", "c2"}
    assert batch.skipped == {"lost": SkipReason.FAILED_ATTEMPT}
    assert batch.rewards == {"r1": 1, "r2": 0}


def test_missing_is_not_zero() -> None:
    rollouts = [rollout("r1"), rollout("r2"), rollout("r3")]
    calls = [call(r.id, f"c{r.id}") for r in rollouts]
    batch = assemble(rollouts, calls, [reward("r1", 1), reward("r2", 0)], SETTINGS)
    assert batch.skipped == {"cr3": SkipReason.NO_REWARD}
    assert [d.advantages[-1] for d in batch.rows] == [0.5, -0.5]


def test_rewards_of_a_rollout_add_up() -> None:
    rollouts = [rollout("r1"), rollout("r2")]
    rewards = [reward("r1", 1.0), reward("r1", 0.5), reward("r2", 0.0)]
    batch = assemble(rollouts, [call("r1", "c1"), call("r2", "c2")], rewards, SETTINGS)
    assert batch.rewards["r1"] == 1.5


def test_a_refused_step_trains_nothing() -> None:
    rollouts = [rollout("r1"), rollout("r2")]
    batch = assemble(
        rollouts, [call("r1", "c1"), call("r2", "c2")], [reward("r1", 1), reward("r2", 0)], SETTINGS
    )
    batch.refuse("non_finite")
    assert batch.trained == set()
    assert set(batch.skipped.values()) == {SkipReason.NON_FINITE_STEP}


outcomes = st.tuples(
    st.sampled_from([RolloutState.SUCCEEDED, RolloutState.FAILED, RolloutState.CANCELLED]),
    st.lists(  # calls: attempt, how they ended, adapter
        st.tuples(
            st.sampled_from("ab"),
            st.sampled_from(list(CallState)),
            st.sampled_from(["policy", "other", None]),
        ),
        max_size=4,
    ),
    st.sampled_from([None, 0.0, 1.0]),
)


@given(st.lists(outcomes, min_size=1, max_size=8))
def test_every_call_gets_exactly_one_verdict(drawn: list) -> None:
    rollouts, calls, rewards = [], [], []
    for i, (state, made, value) in enumerate(drawn):
        name = f"r{i}"
        rollouts.append(rollout(name, group=f"g{i % 2}", state=state))
        for j, (attempt, call_state, adapter) in enumerate(made):
            record = call(name, f"{name}-{j}", attempt, seq=j)
            calls.append(replace(record, state=call_state, adapter=adapter))
        if value is not None:
            rewards.append(reward(name, value))
    batch = assemble(rollouts, calls, rewards, SETTINGS)
    assert not batch.trained & batch.skipped.keys()
    assert batch.trained | batch.skipped.keys() == {c.id for c in calls}
    assert sum(sum(d.mask) for d in batch.rows) == 2 * len(batch.trained)


def test_answers_that_are_too_old_are_dropped_and_their_rollout_still_counts() -> None:
    """Its reward stays in the group's mean, and its newer answers train."""
    rollouts = [rollout("r1"), rollout("r2")]
    calls = [
        call("r1", "old"),
        replace(call("r1", "new", seq=1), adapter_version=4),
        replace(call("r2", "c2"), adapter_version=3),
    ]
    settings = replace(SETTINGS, oldest_version=3)
    batch = assemble(rollouts, calls, [reward("r1", 1), reward("r2", 0)], settings)
    assert batch.skipped == {"old": SkipReason.STALE}
    assert batch.trained == {"new", "c2"}
    assert [max(d.advantages, key=abs) for d in batch.rows] == [0.5, -0.5]


def test_a_temperature_reaches_the_tokens_it_was_asked_for() -> None:
    warm = replace(call("r1", "c1"), params={"temperature": 0.5})
    batch = assemble(
        [rollout("r1"), rollout("r2")],
        [warm, call("r2", "c2")],
        [reward("r1", 1), reward("r2", 0)],
        SETTINGS,
    )
    assert [dict(d.extra) for d in batch.rows] == [{"temperature": [1, 1, 1, 0.5, 0.5]}, {}]
    assert batch.off_policy == {"temperature": 1}
