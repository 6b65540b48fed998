"""Form the members of groups: what is compared with each other.

A member is a rollout. Where a reward of the group names an agent (role), each agent of a rollout is
a member of its own, and is compared with the same agent in the group's other rollouts. So a policy
that plays both sides of a game is compared white with white and black with black. Pure: no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
    rollouts: Sequence[Rollout],
    calls: Sequence[Call],
    rewards: Sequence[Reward],
    rules: SkipRules,
    context: Sequence[Call],
    cut: Cut,
) -> tuple[list[Member], dict[str, SkipReason]]:
    """Return the members in the order of ``rollouts``, and why calls of none of them train.

    Each of ``calls`` is a turn of one member or has a reason. ``context``: all calls of these
    rollouts.
    """
    calls_of, every_of, emitted = by_rollout(calls), by_rollout(context), by_rollout(rewards)
    won = {one.id: winning_rewards(one, emitted[one.id]) for one in rollouts}
    agents = _agents_of_groups(rollouts, calls_of, won)
    members: list[Member] = []
    skipped: dict[str, SkipReason] = {}
    for rollout in rollouts:
        own, lost = _split_by_winner(rollout, calls_of[rollout.id])
        every = sorted(_split_by_winner(rollout, every_of[rollout.id])[0], key=call_order)
        skipped |= {call.id: losing_reason(call, rollout) for call in lost}
        in_group = agents.get(rollout.group_id)
        # A rollout without a winner is missed in the group of each agent.
        those = [None] if in_group is None else _agents(own) if rollout.winner else in_group
        for agent in those:
            part = [call for call in own if agent is None or (call.agent or "") == agent]
            built = cut(part, rules)
            skipped |= built.skipped
            turns = [call for path in built.trajectories for call in path.calls]
            earned = [r for r in won[rollout.id] if agent is None or r.agent in (None, agent)]
            total = sum_rewards(earned)
            paths, turns = built.trajectories, sorted(turns, key=call_order)
            members.append(Member(rollout, agent, every, earned, total, paths, turns))
    return members, skipped


def _agents_of_groups(
    rollouts: Sequence[Rollout],
    calls: Mapping[str | None, Sequence[Call]],
    won: Mapping[str, Sequence[Reward]],
) -> dict[str, list[str]]:
    """Return the agents of each group in which a reward names one."""
    named = {one.group_id for one in rollouts if any(reward.agent for reward in won[one.id])}
    return {
        group: _agents([c for one in rollouts if one.group_id == group for c in calls[one.id]])
        for group in named
    }


def _agents(calls: Sequence[Call]) -> list[str]:
    return sorted({call.agent or "" for call in calls})


def _split_by_winner(rollout: Rollout, calls: Sequence[Call]) -> tuple[list[Call], list[Call]]:
    """Separate the winning attempt's calls from those of the others."""
    parts: tuple[list[Call], list[Call]] = ([], [])
    for call in calls:
        parts[not rollout.winner or call.attempt_id != rollout.winner].append(call)
    return parts
