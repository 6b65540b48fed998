"""What an attempt's end makes of its rollout."""

from __future__ import annotations

import pytest
from store_records import claimed, start_run

from agentrl_tracer.schemas import AttemptState, Policies, Purpose, Reward, RolloutState
from agentrl_tracer.store import Store
from agentrl_trainer.data.rewards import rollout_reward


@pytest.mark.parametrize(
    ("policies", "state", "expected"),
    [
        (Policies(on_error="retry", max_attempts=2), AttemptState.ERROR, RolloutState.QUEUED),
        (Policies(on_error="retry", max_attempts=1), AttemptState.ERROR, RolloutState.FAILED),
        (Policies(on_error="drop"), AttemptState.ERROR, RolloutState.FAILED),
        (Policies(on_error=-1.0), AttemptState.ERROR, RolloutState.SUCCEEDED),
        (Policies(on_timeout="drop"), AttemptState.TIMEOUT, RolloutState.FAILED),
        (Policies(on_timeout=0.0), AttemptState.TIMEOUT, RolloutState.SUCCEEDED),
        (Policies(max_attempts=1), AttemptState.INFRASTRUCTURE, RolloutState.QUEUED),
        (Policies(max_infrastructure_retries=0), AttemptState.LOST, RolloutState.FAILED),
        (Policies(), AttemptState.SUCCEEDED, RolloutState.SUCCEEDED),
        (Policies(on_missing_reward="retry"), AttemptState.SUCCEEDED, RolloutState.QUEUED),
        (
            Policies("drop", "drop", "retry", max_attempts=1),
            AttemptState.SUCCEEDED,
            RolloutState.SUCCEEDED,
        ),
        (Policies(on_missing_reward=-0.5), AttemptState.SUCCEEDED, RolloutState.SUCCEEDED),
    ],
)
def test_policies_decide(
    store: Store, policies: Policies, state: AttemptState, expected: RolloutState
) -> None:
    run_id = start_run(store, policies=policies)
    claim = claimed(store)
    assert store.end_attempt(claim.attempt_id, state, error="boom") == expected
    (rollout,) = store.rollouts(run_id)
    assert rollout.state == expected
    assert rollout.winner == (claim.attempt_id if expected == RolloutState.SUCCEEDED else None)
    rewards = store.rewards([claim.rollout_id])
    decided = (policies.on_error, policies.on_timeout, policies.on_missing_reward)
    numbers = [p for p in decided if not isinstance(p, str)]
    assert [r.value for r in rewards] == numbers
    if expected == RolloutState.FAILED:
        assert rollout.reason is not None
        assert "boom" in rollout.reason


def test_a_missing_reward_is_tried_again_and_an_emitted_one_is_not(store: Store) -> None:
    run_id = start_run(store, policies=Policies(on_missing_reward="retry", max_attempts=2))
    first = claimed(store)
    assert store.end_attempt(first.attempt_id, AttemptState.SUCCEEDED) == RolloutState.QUEUED
    second = claimed(store)
    assert second.attempt_number == 2
    reward = Reward(second.attempt_id, second.rollout_id, "reward", 1.0, key="span")
    store.record_spans([], [reward])
    assert store.end_attempt(second.attempt_id, AttemptState.SUCCEEDED) == RolloutState.SUCCEEDED
    outcomes = store.outcomes(run_id, step=1, purpose=Purpose.TRAIN)
    assert outcomes.attempts == {"no_reward": 1, "succeeded": 1}
    assert outcomes.rollouts == {"succeeded": 1}
    assert outcomes.metrics()["attempts/no_reward"] == 1
    assert store.outcomes(run_id, purpose=Purpose.EVAL).attempts == {}


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


def test_infrastructure_retries_do_not_use_up_attempts(store: Store) -> None:
    run_id = start_run(store, policies=Policies(max_attempts=2))
    for state in [AttemptState.INFRASTRUCTURE] * 3 + [AttemptState.ERROR]:
        assert store.end_attempt(claimed(store).attempt_id, state) == RolloutState.QUEUED
    assert store.end_attempt(claimed(store).attempt_id, AttemptState.ERROR) == RolloutState.FAILED
    assert store.rollouts(run_id)[0].attempts == 5
