"""What a rollout earned, and with which turn. No torch here: evaluation needs nothing else."""

from __future__ import annotations

import math
from collections.abc import Sequence

from agentrl_tracer.schemas import POLICY_REWARD_KEY, Call, Reward, Rollout, RolloutState


def winning_rewards(rollout: Rollout, rewards: Sequence[Reward]) -> list[Reward]:
    """Those that the winning attempt emitted; none without a winner.

    Where a policy decided (``on_error = -1``), its reward stands instead of whatever the attempt
    had emitted before it failed.
    """
    if rollout.state is not RolloutState.SUCCEEDED:
        return []
    mine = [reward for reward in rewards if reward.attempt_id == rollout.winner]
    return [reward for reward in mine if reward.key == POLICY_REWARD_KEY] or mine


def rollout_reward(rollout: Rollout, rewards: Sequence[Reward]) -> float | None:
    """The sum of what its winning attempt emitted; None without one, or without a winner.

    None too if the sum is not a finite number: a NaN says that nobody knows what was earned.
    """
    earned = [float(reward.value) for reward in winning_rewards(rollout, rewards)]
    total = sum(earned)
    return total if earned and math.isfinite(total) else None


def rollout_rewards(
    rollouts: Sequence[Rollout], rewards: Sequence[Reward]
) -> dict[str, float | None]:
    """``rollout_reward`` of each rollout, by id."""
    by_rollout: dict[str, list[Reward]] = {}
    for reward in rewards:
        by_rollout.setdefault(reward.rollout_id, []).append(reward)
    return {r.id: rollout_reward(r, by_rollout.get(r.id, [])) for r in rollouts}


def turn_rewards(
    rewards: Sequence[Reward], calls: Sequence[Call], turns: Sequence[str], *, whole: bool = True
) -> list[float]:
    """What was earned with each turn. ``turns``: ids of some of the attempt's ``calls``, in order.

    A reward belongs to the call whose response or span it names, else to the end. It is credited to
    the last of ``turns`` up to that call: only what came before a reward can have earned it.
    Rewards from before the first turn go to the first one if these turns are the ``whole`` attempt
    (so that the sum is the attempt's reward), and to nobody if they are a branch of it.
    """
    if not turns:
        return []
    ordered = sorted(calls, key=lambda call: (call.seq, call.choice, call.id))
    place = {call.id: at for at, call in enumerate(ordered)}
    by_response = {call.response_id: at for at, call in enumerate(ordered)}
    by_span = {call.span_id: at for at, call in enumerate(ordered) if call.span_id}
    at_turns = [place[turn] for turn in turns]
    earned = [0.0] * len(turns)
    for reward in rewards:
        at = by_response.get(reward.response_id or "")
        if at is None:
            at = by_span.get(reward.span_id or "", len(ordered))
        turn = sum(other <= at for other in at_turns) - 1
        if turn >= 0:
            earned[turn] += float(reward.value)
        elif whole:
            earned[0] += float(reward.value)
    return earned
