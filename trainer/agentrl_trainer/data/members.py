"""Form the members of groups: what is compared with each other.

A member is a rollout. Where a reward of the group names an agent (role), each agent of a rollout is
a member of its own, and is compared with the same agent in the group's other rollouts. So a policy
that plays both sides of a game is compared white with white and black with black. Pure: no torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from agentrl_tracer.schemas import Call, Reward, Rollout, SkipReason
from agentrl_trainer.data.rewards import by_rollout, sum_rewards, winning_rewards
from agentrl_trainer.data.skip_reasons import SkipRules, losing_reason
from agentrl_trainer.data.trajectories import Trajectory, TrajectorySet, call_order

Cut: TypeAlias = Callable[[Sequence[Call], SkipRules], TrajectorySet]
"""Cuts the calls of a member into trajectories: ``build_trajectories``, or another function."""


@dataclass(frozen=True, slots=True)
class Member:
    """The winning attempt of a rollout, or what one of its agents did in it."""

    rollout: Rollout
    agent: str | None
    """The agent (role), empty for calls that name none; None: the whole rollout."""
    calls: list[Call]
    """All calls of the attempt in order, those of other agents and models too."""
    rewards: list[Reward]
    """The rewards that count for it."""
    total: float | None
    """Their sum; None without any, or if one was refused."""
    trajectories: list[Trajectory]
    turns: list[Call]
    """The calls that its trajectories train, in order."""

    @property
    def group(self) -> str:
        """The name of the group in which it is compared."""
        of = self.rollout.group_id
        return of if self.agent is None else f"{of}/{self.agent}"


def members_of(
    rollouts: Sequence[Rollout], calls: Sequence[Call], rewards: Sequence[Reward],
    rules: SkipRules, context: Sequence[Call], cut: Cut,
) -> tuple[list[Member], dict[str, SkipReason]]:  # fmt: skip
    """Return the members in the order of ``rollouts``, and why calls of none of them train.

    Each of ``calls`` is a turn of one member or has a reason. ``context``: all calls of these
    rollouts.
    """
    calls_of, every_of, emitted = by_rollout(calls), by_rollout(context), by_rollout(rewards)
    won = {one.id: winning_rewards(one, emitted[one.id]) for one in rollouts}
    named = {one.group_id for one in rollouts if any(reward.agent for reward in won[one.id])}
    in_group: defaultdict[str, set[str]] = defaultdict(set)
    for one in rollouts:
        in_group[one.group_id] |= _agents(calls_of[one.id])
    members: list[Member] = []
    skipped: dict[str, SkipReason] = {}
    for rollout in rollouts:
        mine, winner = calls_of[rollout.id], rollout.winner
        own = [call for call in mine if call.attempt_id == winner]
        skipped |= {c.id: losing_reason(c, rollout) for c in mine if c.attempt_id != winner}
        all_won = [call for call in every_of[rollout.id] if call.attempt_id == winner]
        every = sorted(all_won, key=call_order)
        # A rollout without a winner is missed in the group of each agent.
        agents = _agents(own) if winner else in_group[rollout.group_id]
        for agent in sorted(agents) if rollout.group_id in named else [None]:
            part = [call for call in own if agent is None or (call.agent or "") == agent]
            built = cut(part, rules)
            skipped |= built.skipped
            turns = [call for path in built.trajectories for call in path.calls]
            earned = [r for r in won[rollout.id] if agent is None or r.agent in (None, agent)]
            total = sum_rewards(earned)
            paths, turns = built.trajectories, sorted(turns, key=call_order)
            members.append(Member(rollout, agent, every, earned, total, paths, turns))
    return members, skipped


def _agents(calls: Sequence[Call]) -> set[str]:
    return {call.agent or "" for call in calls}
