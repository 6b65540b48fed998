"""Records of rollouts, calls and rewards, and random trees of calls."""

from __future__ import annotations

import dataclasses
from typing import Any

from hypothesis import strategies as st

from agentrl_tracer.schemas import Call, CallState, Purpose, Reward, Rollout, RolloutState
from agentrl_trainer.data.training_row import TrainingRow, to_training_row
from agentrl_trainer.data.trajectories import TrajectorySet


def make(name: str, prompt: list[int], response: list[int], seq: int = 0, **changes: Any) -> Call:
    call = Call(
        id=name, response_id=name, choice=0, run_id="run", rollout_id="rollout",
        attempt_id="attempt", seq=seq, agent=None, model="policy", adapter="default",
        adapter_version=3, state=CallState.COMPLETED, prompt_ids=prompt, response_ids=response,
        # Unmistakable: a log-prob says which call and which position it belongs to.
        response_logprobs=[-(seq + 1) - i / 1000 for i in range(len(response))],
        finish_reason="stop", params={}, request=None, response=None, error=None, trace_id=None,
        span_id=None, started_at=0.0, ended_at=1.0,
    )  # fmt: skip
    return dataclasses.replace(call, **changes)


def rollout(
    name: str, group: str = "g", state: RolloutState = RolloutState.SUCCEEDED, task: str = "task"
) -> Rollout:
    winner = f"{name}-a" if state is RolloutState.SUCCEEDED else None
    return Rollout(
        name, "run", task, group, Purpose.TRAIN, 1, 0, 0, state, None, 1, winner, 0.0, 0.0, 0.0
    )


def call_of(of: str, name: str, attempt: str = "a", seq: int = 0) -> Call:
    return make(
        name, [1, 2, seq + 3], [7, 8], seq, rollout_id=of, attempt_id=f"{of}-{attempt}",
        adapter="policy", adapter_version=0, response_logprobs=[-0.5, -0.25],
    )  # fmt: skip


def reward(of: str, value: float, attempt: str = "a") -> Reward:
    return Reward(f"{of}-{attempt}", of, "reward", value, key=f"{of}{attempt}{value}")


def check_invariants(calls: list[Call], built: TrajectorySet) -> list[TrainingRow]:
    """Return the rows of the trajectories, each with advantage 1 at what trains."""
    assert {trajectory.adapter for trajectory in built.trajectories} <= {c.adapter for c in calls}
    trained = [call for trajectory in built.trajectories for call in trajectory.call_ids]
    assert sorted([*trained, *built.skipped]) == sorted(call.id for call in calls)
    rows: list[TrainingRow] = []
    for trajectory in built.trajectories:
        row = to_training_row(trajectory, dict.fromkeys(trajectory.call_ids, 1.0))
        mask = [False] * len(row.tokens)
        for call in trajectory.calls:
            start, end = len(call.prompt_ids), len(call.prompt_ids) + len(call.response_ids)
            assert call.adapter == row.adapter
            assert row.tokens[:end] == call.prompt_ids + call.response_ids
            assert row.logprobs[start:end] == call.response_logprobs
            assert not any(mask[start:end]), "turns overlap"
            mask[start:end] = [True] * (end - start)
        assert row.mask == mask
        assert row.advantages == mask
        assert not any(logprob for on, logprob in zip(mask, row.logprobs, strict=True) if not on)
        rows.append(row)
    return rows


@st.composite
def call_trees(draw: st.DrawFn) -> list[Call]:
    """Random agents: continue a call, branch off it, resample it, or begin something new."""
    tokens = st.integers(0, 2)  # a small alphabet, so that prefixes coincide by accident too
    some = st.lists(tokens, min_size=1, max_size=3)
    calls: list[Call] = []
    for seq in range(draw(st.integers(1, 12))):
        prompt = draw(some)
        if calls and draw(st.integers(0, 3)):
            other = draw(st.sampled_from(calls))
            whole = other.prompt_ids + other.response_ids
            prompt = draw(st.sampled_from([other.prompt_ids, whole, whole + prompt])) or prompt
        calls.append(
            make(
                f"c{seq}", prompt, draw(st.one_of(some, some, some, st.just([]))), seq=seq,
                adapter=draw(st.sampled_from(["x", "x", "y", None])),
                adapter_version=draw(st.integers(0, 3)),
                state=draw(st.sampled_from([*[CallState.COMPLETED] * 5, *CallState])),
            )
        )  # fmt: skip
    return calls
