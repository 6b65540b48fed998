"""What a reward function is given: a finished rollout, as its winning attempt recorded it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.history.export import chat_of
from agentrl.history.rollout.conversation import answered, conversation
from agentrl_tracer.conventions import NOTE_DATA, NOTE_NAME, NOTE_SPAN
from agentrl_tracer.schemas import Call, CallState, Json, Reward, Rollout, RolloutState, Span
from agentrl_tracer.store import Store
from agentrl_trainer.data.rewards import by_rollout
from agentrl_trainer.data.trajectories import call_order


@dataclass(frozen=True)
class Trace:
    """One finished rollout.

    ``messages`` and ``answer`` are of the model that the rollout was made with; what other models
    answered, a judge or a simulated user, is among ``calls``.
    """

    task: Json
    rollout_id: str
    attempt_id: str
    group_id: str
    messages: list[Json]
    """The longest conversation in OpenAI's form, its last answer included."""
    answer: str
    """Text of the last answer, without reasoning; empty if it only calls tools."""
    calls: list[Call]
    """All calls in order."""
    rewards: list[Reward]
    """What the agent has emitted; of a re-score also what was computed before."""
    notes: dict[str, Any]
    """What the agent left with ``agentrl.emit``, by name; of several with one name the last."""


def read_traces(store: Store, rollouts: Sequence[Rollout]) -> list[Trace]:
    """Read the traces of the rollouts that succeeded, in their order."""
    won = [one for one in rollouts if one.winner and one.state is RolloutState.SUCCEEDED]
    calls = by_rollout(store.calls(attempt_ids=[one.winner for one in won if one.winner]))
    rewards = by_rollout(store.rewards([one.id for one in won]))
    return [_trace(store, one, calls[one.id], rewards[one.id]) for one in won]


def _trace(
    store: Store, rollout: Rollout, calls: Sequence[Call], rewards: Sequence[Reward]
) -> Trace:
    winner = rollout.winner or ""
    split, _, index = rollout.task_id.removeprefix(f"{rollout.run_id}-").rpartition("-")
    ordered = sorted(calls, key=call_order)
    done = [call for call in ordered if call.state is CallState.COMPLETED]
    own = [call for call in done if call.prompt_ids] or done
    answer = answered(own[-1].response) if own else None
    return Trace(
        task=store.task(rollout.run_id, split, int(index)) or {},
        rollout_id=rollout.id, attempt_id=winner, group_id=rollout.group_id,
        messages=max(map(_messages, reversed(own)), key=len, default=[]),  # of equals the last
        answer=answer.text if answer else "",
        calls=ordered,
        rewards=[one for one in rewards if one.attempt_id == winner],
        notes=_notes(span for span in store.spans(rollout.id) if span.attempt_id == winner),
    )  # fmt: skip


def _messages(call: Call) -> list[Json]:
    if chat := chat_of(call):
        return chat["messages"]
    return [{"role": said.role, "content": said.text} for said in conversation(call)]


def _notes(spans: Iterable[Span]) -> dict[str, Any]:
    notes: dict[str, Any] = {}
    for span in spans:
        if span.name == NOTE_SPAN:
            name, data = (span.attributes.get(key) for key in (NOTE_NAME, NOTE_DATA))
            try:
                notes[str(name)] = json.loads(str(data))
            except ValueError:  # written by another client than ours
                notes[str(name)] = data
    return notes
