"""From the records of one step to what the learner trains on, and a verdict on every call.

Pure: rollouts, calls and rewards in; datums and verdicts out. Here the contract "each call is
trained on, or skipped with one reason" is kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, pstdev

from agentrl_tracer.schemas import Call, Reward, Rollout, RolloutState, SkipReason
from agentrl_trainer.advantages import GroupAdvantages, group_advantages
from agentrl_trainer.batches import Datum, to_datum
from agentrl_trainer.rewards import rollout_rewards
from agentrl_trainer.trajectories import Trajectory, build_trajectories

_GROUP_REASONS = (SkipReason.SMALL_GROUP, SkipReason.ZERO_ADVANTAGE)


@dataclass(frozen=True, slots=True)
class StepSettings:
    """How records become datums."""

    adapters: frozenset[str]  # those in training
    max_length: int  # tokens of a trajectory
    estimator: str = "grpo"
    normalize_std: bool = False
    min_group: int = 2


@dataclass(slots=True)
class StepBatch:
    """Invariant: each call of the step is in ``trained`` or in ``skipped``, never in both."""

    datums: list[Datum] = field(default_factory=list[Datum])
    trained: set[str] = field(default_factory=set[str])
    skipped: dict[str, SkipReason] = field(default_factory=dict[str, SkipReason])
    rewards: dict[str, float | None] = field(default_factory=dict[str, float | None])
    """By rollout id; None where a rollout failed or emitted none."""
    groups: dict[str, GroupAdvantages] = field(default_factory=dict[str, GroupAdvantages])

    def refuse(self, reason: SkipReason) -> None:
        """The learner refused the step: nothing in it was trained on."""
        self.skipped |= dict.fromkeys(self.trained, reason)
        self.trained = set()

    def _groups_skipped(self, reason: SkipReason) -> int:
        return sum(
            reason in group.skipped and all(why is not None for why in group.skipped)
            for group in self.groups.values()
        )

    def metrics(self) -> dict[str, float]:
        """The step in numbers. Reward statistics are over rollouts that have a reward."""
        scores = [reward for reward in self.rewards.values() if reward is not None]
        advantages = [
            advantage
            for group in self.groups.values()
            for advantage, reason in zip(group.advantages, group.skipped, strict=True)
            if advantage is not None and reason is None
        ]
        used = [g for g in self.groups.values() if any(reason is None for reason in g.skipped)]
        return {
            "reward/mean": fmean(scores) if scores else float("nan"),
            "reward/std": pstdev(scores) if scores else float("nan"),
            "reward/missing": len(self.rewards) - len(scores),
            "advantage/max": max(advantages, default=0.0),
            "advantage/min": min(advantages, default=0.0),
            "groups/used": len(used),
            "groups/skipped": len(self.groups) - len(used),
            # Why, as the advantages say: a group is too small, or all its members earned the same.
            **{f"groups/{reason}": self._groups_skipped(reason) for reason in _GROUP_REASONS},
        }


def assemble(
    rollouts: Sequence[Rollout],
    calls: Sequence[Call],
    rewards: Sequence[Reward],
    settings: StepSettings,
) -> StepBatch:
    """Judges every call of a step's finished rollouts and builds the datums of those that train.

    Datums come in the order of ``rollouts``, so that equal records make equal batches.
    """
    batch = StepBatch()
    calls_of: dict[str | None, list[Call]] = {}
    for call in calls:
        calls_of.setdefault(call.rollout_id, []).append(call)

    batch.rewards = rollout_rewards(rollouts, rewards)
    credit = _credit(rollouts, batch, settings)
    for rollout in rollouts:
        advantage, group_reason = credit[rollout.id]
        trajectories = _trajectories(rollout, calls_of.get(rollout.id, []), batch, settings)
        for trajectory in trajectories:
            if group_reason is not None:
                batch.skipped |= dict.fromkeys(trajectory.call_ids, group_reason)
            else:
                batch.trained |= set(trajectory.call_ids)
                batch.datums.append(to_datum(trajectory, advantage))
    return batch


def _credit(
    rollouts: Sequence[Rollout], batch: StepBatch, settings: StepSettings
) -> Mapping[str, tuple[float, SkipReason | None]]:
    """Each rollout's advantage within its group, or why it has none."""
    groups: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.group_id, []).append(rollout)
    credit: dict[str, tuple[float, SkipReason | None]] = {}
    for group_id, members in groups.items():
        result = group_advantages(
            [batch.rewards[member.id] for member in members],
            estimator=settings.estimator,
            normalize_std=settings.normalize_std,
            min_group=settings.min_group,
        )
        batch.groups[group_id] = result
        for member, advantage, reason in zip(
            members, result.advantages, result.skipped, strict=True
        ):
            credit[member.id] = (advantage or 0.0, reason)
    return credit


def _trajectories(
    rollout: Rollout, calls: Sequence[Call], batch: StepBatch, settings: StepSettings
) -> list[Trajectory]:
    """The winning attempt's trajectories; all that falls away is noted in ``batch.skipped``."""
    lost = (
        SkipReason.FAILED_ATTEMPT
        if rollout.state is RolloutState.SUCCEEDED
        else SkipReason.FAILED_ROLLOUT
    )
    winning = [call for call in calls if rollout.winner and call.attempt_id == rollout.winner]
    for call in calls:
        if call not in winning:
            batch.skipped[call.id] = call.skip_reason or lost
    built = build_trajectories(winning, max_length=settings.max_length, adapters=settings.adapters)
    batch.skipped |= built.skipped
    return built.trajectories
