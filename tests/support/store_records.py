"""Runs, claims and calls for tests of the store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import sqlalchemy as sa
from call_records import make

from agentrl_tracer.schemas import (
    AttemptState,
    Call,
    Claim,
    NewRollout,
    Policies,
    Purpose,
    Reward,
    Span,
)
from agentrl_tracer.store import Store
from agentrl_tracer.store.calls import Delivery


def enqueue(
    store: Store, run_id: str, task: Any, count: int = 1, split: str = "train", step: int = 0
) -> list[str]:
    """Queue rollouts of one task; return their ids."""
    [task_id] = store.add_tasks(run_id, split, [task])
    new = [NewRollout(task_id, "g", Purpose.TRAIN, step, i, seed=i) for i in range(count)]
    return store.enqueue(run_id, new)


def start_run(store: Store, rollouts: int = 1, policies: Policies | None = None) -> str:
    run_id = store.create_run("test", "train", {}, policies)
    enqueue(store, run_id, {"n": 7}, rollouts, step=1)
    return run_id


def claimed(store: Store, lease_s: float = 30.0) -> Claim:
    claim = store.claim("runner", lease_s, store.runs()[-1]["id"])
    assert claim is not None
    return claim


def waits_for_a_lock(store: Store) -> bool:
    """Tell whether a transaction of this PostgreSQL server waits for another one."""
    return bool(store.db.fetch(sa.text("SELECT 1 FROM pg_locks WHERE NOT granted")))


def record_spans(store: Store, spans: Sequence[Span], rewards: Sequence[Reward] = ()) -> None:
    """Store spans and rewards as a gateway's delivery of no attempt."""
    store.write_calls("boot", [], [Delivery(None, spans, rewards)], 0)


def call_of(claim: Claim, name: str, **changes: Any) -> Call:
    call = make(
        name, [1, 2], [151643], run_id=claim.run_id, rollout_id=claim.rollout_id,
        attempt_id=claim.attempt_id, adapter="policy",
    )  # fmt: skip
    return replace(call, **changes)


def record_answer(
    store: Store, run_id: str, purpose: Purpose, step: int, said: tuple[str, str], reward: float,
    split: str = "",
) -> str:  # fmt: skip
    """Record a rollout that asked once, was answered, and was rewarded; return its id.

    Args:
        said: what the agent asked, and what the model answered.
        split: of the task, by default the purpose.
    """
    [task] = store.add_tasks(run_id, split or purpose, [{"n": 7}])
    store.enqueue(run_id, [NewRollout(task, f"{purpose}-{step}", purpose, step, 0, seed=0)])
    claim = claimed(store)
    request = {"messages": [{"role": "user", "content": said[0]}]}
    answer = {"choices": [{"message": {"role": "assistant", "content": said[1]}}]}
    name = f"chatcmpl-{claim.attempt_id}"
    call = call_of(claim, name, request=request, response=answer, response_logprobs=[-1.0])
    earned = Reward(claim.attempt_id, claim.rollout_id, "reward", reward, key="k")
    store.write_calls("boot", [], [call, Delivery(claim.attempt_id, [], [earned])], 1)
    store.end_attempt(claim.attempt_id, AttemptState.SUCCEEDED)
    return claim.rollout_id
