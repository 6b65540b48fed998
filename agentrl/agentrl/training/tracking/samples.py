"""Some rollouts of an evaluation and of the step before it, as a table for trackers."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from agentrl.history.rollout.conversation import Message, conversation, shown_before
from agentrl.runs.folder import RunFolder
from agentrl.runs.token_records import read_call
from agentrl.training.tracking.trackers import Samples
from agentrl_tracer.schemas import Call, Purpose, Rollout, RolloutState
from agentrl_tracer.store import Store
from agentrl_trainer.data.rewards import by_rollout, rollout_rewards

_MOST = 16  # rollouts of each purpose
_LONGEST = 4000  # characters of a conversation


def samples_of(folder: RunFolder, store: Store, run_id: str, step: int) -> Samples:
    """Return the first rollouts that were evaluated after ``step``, and the first of the step."""
    chosen: list[Rollout] = []
    for purpose in (Purpose.EVAL, Purpose.TRAIN):
        made = store.rollouts(run_id, step=step, purpose=purpose)
        chosen += [one for one in made if one.state is not RolloutState.CANCELLED][:_MOST]
    ids = [rollout.id for rollout in chosen]
    calls = by_rollout(store.calls(rollout_ids=ids))
    rewards = rollout_rewards(chosen, store.rewards(ids))
    return [
        {
            "rollout": rollout.id,
            "purpose": rollout.purpose,
            "task": rollout.task_id.rpartition("-")[2],
            "reward": rewards[rollout.id],
            "advantage": _advantage(folder, calls[rollout.id]),
            "messages": _conversation(rollout, calls[rollout.id]),
        }
        for rollout in chosen
    ]


def _advantage(folder: RunFolder, calls: Sequence[Call]) -> float | None:
    """Return the mean advantage over the tokens that trained."""
    seen = [read_call(folder, call) for call in calls]
    values = [float(one) for tokens in seen if tokens for one in tokens.advantage]
    return fmean(values) if values else None


def _conversation(rollout: Rollout, calls: Sequence[Call]) -> str:
    """Return the messages of the winning attempt, each once; where none won, why."""
    told: list[list[Message]] = []
    lines: list[str] = []
    for call in calls:
        if sum(map(len, lines)) >= _LONGEST:  # the others' messages would be cut off
            break
        if call.attempt_id == rollout.winner:
            messages = conversation(call)
            new = messages[shown_before(messages, told) :]
            lines += [f"{message.role}: {message.said}" for message in new]
            told.append(messages)
    text = "\n".join(lines) if rollout.winner else rollout.reason or rollout.state
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
