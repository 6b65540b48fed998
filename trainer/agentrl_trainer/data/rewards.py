"""Tell what a rollout earned, and with which turn. No torch here."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TypeVar

from agentrl_tracer.schemas import (
    POLICY_REWARD_KEY,
    Call,
    Reward,
    Rollout,
    RolloutState,
    is_reward,
)
from agentrl_trainer.data.trajectories import call_order

Record = TypeVar("Record", Call, Reward)


def by_rollout(records: Iterable[Record]) -> defaultdict[str | None, list[Record]]:
    """Group calls or rewards by the id of their rollout."""
    found: defaultdict[str | None, list[Record]] = defaultdict(list)
    for record in records:
        found[record.rollout_id].append(record)
    return found


def winning_rewards(rollout: Rollout, rewards: Sequence[Reward]) -> list[Reward]:
    """Select the rewards of the winning attempt; none without a winner.

    A policy's reward (``on_error = -1``) replaces what the attempt had emitted before it failed.
    """
    if rollout.state is not RolloutState.SUCCEEDED:
        return []
    won = [reward for reward in rewards if reward.attempt_id == rollout.winner]
    return [reward for reward in won if reward.key == POLICY_REWARD_KEY] or won


def rollout_reward(rollout: Rollout, rewards: Sequence[Reward]) -> float | None:
    """Sum what the winning attempt emitted; None without a reward or a winner.

    None too if one of the rewards was refused: the others are not what was earned.
    """
    earned = [float(reward.value) for reward in winning_rewards(rollout, rewards)]
    total = sum(earned)
    return total if earned and all(map(is_reward, earned)) else None


def rollout_rewards(
    rollouts: Sequence[Rollout], rewards: Sequence[Reward]
) -> dict[str, float | None]:
    """Compute ``rollout_reward`` of each rollout, by id."""
    emitted = by_rollout(rewards)
    return {r.id: rollout_reward(r, emitted[r.id]) for r in rollouts}


def turn_rewards(
    rewards: Sequence[Reward], calls: Sequence[Call], turns: Sequence[str], *, whole: bool = True
) -> list[float]:
    """Sum the rewards earned with each of ``turns``: ids of some of the attempt's calls, in order.

    A reward belongs to the call whose response or span it names, else to the end of the attempt. It
    is credited to the last turn up to that call. Rewards from before the first turn go to the first
    turn if the turns are the ``whole`` attempt (so that the sum is the attempt's reward); a branch
    of the attempt does not get them.
    """
    if not turns:
        return []
    ordered = sorted(calls, key=call_order)
    place = {call.id: at for at, call in enumerate(ordered)}
    by_response = {call.response_id: at for at, call in enumerate(ordered)}
    by_span = {call.span_id: at for at, call in enumerate(ordered) if call.span_id}
    earned = [0.0] * len(turns)
    for reward in rewards:
        at = by_response.get(reward.response_id or "")
        if at is None:
            at = by_span.get(reward.span_id or "", len(ordered))
        turn = sum(place[other] <= at for other in turns) - 1
        if turn >= 0 or whole:
            earned[max(turn, 0)] += float(reward.value)
    return earned
