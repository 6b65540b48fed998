"""Emitted rewards and those of a policy."""

from __future__ import annotations

from dataclasses import replace

from store_records import claimed, start_run

from agentrl_tracer.schemas import (
    AttemptState,
    Policies,
    Reward,
)
from agentrl_tracer.store import Store
from agentrl_trainer.data.rewards import rollout_reward


def test_a_policys_reward_stands_instead_of_what_was_emitted(store: Store) -> None:
    run_id = start_run(store, policies=Policies(on_error=-1.0))
    claim = claimed(store)
    store.record_spans([], [Reward(claim.attempt_id, claim.rollout_id, "reward", 5.0, key="span")])
    store.end_attempt(claim.attempt_id, AttemptState.ERROR, error="boom")
    rewards = store.rewards([claim.rollout_id])
    assert sorted(r.value for r in rewards) == [-1.0, 5.0]  # nothing recorded is lost
    (rollout,) = store.rollouts(run_id)
    assert rollout_reward(rollout, rewards) == -1.0
    outcomes = store.outcomes(run_id)
    assert outcomes.policy_rewards == {"on_error": 1}
    assert outcomes.metrics()["rewards/on_error"] == 1


def test_a_reward_delivered_twice_counts_once(store: Store) -> None:
    start_run(store)
    claim = claimed(store)
    reward = Reward(claim.attempt_id, claim.rollout_id, "reward", 1.0, key="span-1")
    store.record_spans([], [reward])
    store.record_spans([], [reward, replace(reward, key="span-2", value=0.5)])
    assert [r.value for r in store.rewards([claim.rollout_id])] == [1.0, 0.5]
