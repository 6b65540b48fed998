"""Tell what a rollout earned, and with which turn. No torch here."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from statistics import fmean
from typing import TypeVar

from agentrl_tracer.conventions import ASIDE
from agentrl_tracer.schemas import (
    HUMAN_REWARD_KEY,
    POLICY_REWARD_KEY,
    Call,
    Feedback,
    Reward,
    Rollout,
    RolloutState,
    is_reward,
)
from agentrl_trainer.data.trajectories import call_order

Record = TypeVar("Record", Call, Feedback, Reward)


def by_rollout(records: Iterable[Record]) -> defaultdict[str | None, list[Record]]:
    """Group records by the id of their rollout."""
    found: defaultdict[str | None, list[Record]] = defaultdict(list)
    for record in records:
        found[record.rollout_id].append(record)
    return found


def winning_rewards(
    rollout: Rollout, rewards: Sequence[Reward], *, aside: bool = False
) -> list[Reward]:
    """Select the rewards of the winning attempt; none without a winner.

    A policy's reward (``on_error = -1``) replaces what the attempt had emitted before it failed.

    Args:
        aside: include those that a re-score has set aside, which do not count.
    """
    if rollout.state is not RolloutState.SUCCEEDED:
        return []
    won = [reward for reward in rewards if reward.attempt_id == rollout.winner]
    won = [reward for reward in won if aside or not reward.key.startswith(ASIDE)]
    return [reward for reward in won if reward.key == POLICY_REWARD_KEY] or won


def rollout_reward(rollout: Rollout, rewards: Sequence[Reward]) -> float | None:
    """Sum what the winning attempt emitted; None without a reward or a winner.

    None too if one of the rewards was refused: the others are not what was earned.
    """
    return sum_rewards(winning_rewards(rollout, rewards))


def sum_rewards(rewards: Sequence[Reward]) -> float | None:
    """Sum rewards; None without any, or if one of them was refused."""
    earned = [float(reward.value) for reward in rewards]
    if not earned or not all(map(is_reward, earned)):
        return None
    return math.fsum(earned)  # of 0.7, 0.2 and 0.1 it is 1, which is a success


def unclaimed_rewards(
    rollouts: Sequence[Rollout], calls: Sequence[Call], rewards: Sequence[Reward]
) -> Counter[str]:
    """Count the winning attempts' rewards for agents that made none of the calls, by the agent."""
    emitted = by_rollout(rewards)
    called = {call.agent for call in calls}
    return Counter(
        reward.agent
        for rollout in rollouts
        for reward in winning_rewards(rollout, emitted[rollout.id])
        if reward.agent is not None and reward.agent not in called
    )


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


def human_rewards(
    feedback: Sequence[Feedback], rollouts: Sequence[Rollout], calls: Sequence[Call],
    names: Collection[str],
) -> list[Reward]:  # fmt: skip
    """Return the rewards ``human:NAME`` that a configuration names, made from feedback.

    The value is the mean of each person's newest score or thumb on the same rollout or call.
    """
    newest: dict[tuple[str | None, str | None, str], dict[str, float]] = {}
    for one in sorted(feedback, key=lambda one: one.created_at):
        name = f"human:{one.name}"
        if name in names and one.value is not None:
            newest.setdefault((one.rollout_id, one.call_id, name), {})[one.author] = one.value
    winner = {rollout.id: rollout.winner for rollout in rollouts}
    by_id = {call.id: call for call in calls}
    rewards: list[Reward] = []
    for (rollout_id, call_id, name), by_author in newest.items():
        call = by_id.get(call_id or "")
        attempt = winner.get(rollout_id or "") if call is None else call.attempt_id
        if rollout_id and attempt:
            rewards.append(
                Reward(
                    attempt, rollout_id, name, fmean(by_author.values()), HUMAN_REWARD_KEY,
                    response_id=call and call.response_id,
                )
            )  # fmt: skip
    return rewards
