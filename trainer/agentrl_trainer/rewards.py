"""What a rollout earned. No torch here: evaluation needs nothing else of the trainer."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl_tracer.schemas import POLICY_REWARD_KEY, Reward, Rollout, RolloutState


def rollout_reward(rollout: Rollout, rewards: Sequence[Reward]) -> float | None:
    """The sum of what its winning attempt emitted; None without one, or without a winner.

    Where a policy decided (``on_error = -1``), its reward stands instead of whatever the attempt
    had emitted before it failed.
    """
    if rollout.state is not RolloutState.SUCCEEDED:
        return None
    mine = [reward for reward in rewards if reward.attempt_id == rollout.winner]
    decided = [reward for reward in mine if reward.key == POLICY_REWARD_KEY]
    earned = [reward.value for reward in decided or mine]
    return sum(earned) if earned else None


def rollout_rewards(
    rollouts: Sequence[Rollout], rewards: Sequence[Reward]
) -> dict[str, float | None]:
    """``rollout_reward`` of each rollout, by id."""
    by_rollout: dict[str, list[Reward]] = {}
    for reward in rewards:
        by_rollout.setdefault(reward.rollout_id, []).append(reward)
    return {r.id: rollout_reward(r, by_rollout.get(r.id, [])) for r in rollouts}
