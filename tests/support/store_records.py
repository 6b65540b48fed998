"""Runs, claims and calls for tests of the store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from agentrl_tracer.schemas import (
    Call,
    CallState,
    Claim,
    NewRollout,
    Policies,
    Purpose,
    Reward,
    Span,
)
from agentrl_tracer.store import Store
from agentrl_tracer.store.calls import Delivery


def start_run(store: Store, rollouts: int = 1, policies: Policies | None = None) -> str:
    run_id = store.create_run("test", "train", {}, policies)
    (task,) = store.add_tasks(run_id, "train", [{"n": 7}])
    store.enqueue(
        run_id, [NewRollout(task, "g", Purpose.TRAIN, 1, i, seed=i) for i in range(rollouts)]
    )
    return run_id


def claimed(store: Store, lease_s: float = 30.0) -> Claim:
    claim = store.claim("runner", lease_s, store.runs()[-1]["id"])
    assert claim is not None
    return claim


def record_spans(store: Store, spans: Sequence[Span], rewards: Sequence[Reward] = ()) -> None:
    """Store spans and rewards as a gateway's delivery of no attempt."""
    store.write_calls("boot", [], [Delivery(None, spans, rewards)], 0)


def call_of(claim: Claim, name: str, **changes: object) -> Call:
    call = Call(
        id=name, response_id=name, choice=0, run_id=claim.run_id, rollout_id=claim.rollout_id,
        attempt_id=claim.attempt_id, seq=0, agent=None, model="m", adapter="policy",
        adapter_version=3, state=CallState.COMPLETED, prompt_ids=[1, 2], response_ids=[151643],
        response_logprobs=[-0.25], finish_reason="stop", params={}, request=None, response=None,
        error=None, trace_id=None, span_id=None, started_at=1.0, ended_at=2.0,
    )  # fmt: skip
    return replace(call, **changes)
