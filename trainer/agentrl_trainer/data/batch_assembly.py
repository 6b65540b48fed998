"""Turn the records of one step into training rows, and give each call its verdict.

Pure: rollouts, calls and rewards in; rows and verdicts out. Here the contract "each call is trained
on, or skipped with one reason" is kept; the reasons themselves are ``skip_reasons``'.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from agentrl_tracer.schemas import Call, Reward, Rollout, SkipReason
from agentrl_trainer.data.advantages import (
    BY_TOKEN,
    BY_TURN,
    ESTIMATORS,
    CreditSettings,
    GroupAdvantages,
    TurnAdvantages,
    group_advantages,
    state_advantages,
    turn_advantages,
    whiten_groups,
)
from agentrl_trainer.data.members import Cut, Member, members_of
from agentrl_trainer.data.own_estimator import OwnEstimator, own_advantages
from agentrl_trainer.data.rewards import rollout_rewards, turn_rewards
from agentrl_trainer.data.skip_reasons import (
    GROUP_REASONS,
    SkipRules,
    importance_weight,
    member_reason,
    sampled_otherwise,
    temperature_of,
)
from agentrl_trainer.data.state_grouping import anchor_states
from agentrl_trainer.data.training_row import TrainingRow, to_training_row, with_extra
from agentrl_trainer.data.trajectories import Trajectory, build_trajectories

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

LengthNormalization = Literal["token", "sequence", "constant", "rollout"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings(SkipRules, CreditSettings):
    """How records become rows."""

    length_normalization: LengthNormalization = "token"
    length_constant: int = 1024  # tokens; for length_normalization constant
    own: OwnEstimator | None = None  # takes the place of ``estimator``
    trajectories: Cut = build_trajectories


class SeenRow(NamedTuple):
    """A row in the first epoch, before the update."""

    row: TrainingRow
    calls: list[str]
    logprobs: NDArray[np.float32]  # [tokens - 1]: of every token but the first; 0 where none trains


@dataclass(slots=True)
class StepBatch:
    """Invariant: each call of the step is in ``trained`` or in ``skipped``, never in both."""

    rows: list[TrainingRow] = field(default_factory=list[TrainingRow])
    calls_of_rows: list[list[str]] = field(default_factory=list[list[str]])
    """The ids of the calls that each row trains."""
    trained: set[str] = field(default_factory=set[str])
    skipped: dict[str, SkipReason] = field(default_factory=dict[str, SkipReason])
    rewards: dict[str, float | None] = field(default_factory=dict[str, float | None])
    """By rollout id; None if the rollout failed or emitted none."""
    of_agents: dict[str, dict[str, float | None]] = field(
        default_factory=dict[str, dict[str, "float | None"]]
    )
    """What each agent earned by rollout id, in groups where rewards name an agent."""
    group_of: dict[str, str] = field(default_factory=dict[str, str])
    """By rollout id."""
    unclaimed: Counter[str] = field(default_factory=Counter[str])
    """Rewards for agents that made no call in the step, by agent."""
    unasked: set[str] = field(default_factory=set[str])
    """Rollouts that earned a reward without a call of a model in training."""
    groups: dict[str, list[SkipReason | None]] = field(
        default_factory=dict[str, list[SkipReason | None]]
    )
    """Why each member of a group does not train; None: it does."""
    off_policy: Counter[str] = field(default_factory=Counter[str])
    """Trained calls by how their sampling deviated from the policy at temperature 1."""
    first_pass: list[SeenRow] = field(default_factory=list[Any])
    """What the learner saw of each row that trained, once it has."""
    owners: list[str] = field(default_factory=list[str])
    """The rollout of each row."""
    normalization: tuple[LengthNormalization, int] = ("token", 0)
    """How lengths are normalized, and the constant."""

    def refuse(self, why: SkipReason) -> None:
        """Mark all calls as skipped: the learner did not apply the step."""
        self.skipped |= dict.fromkeys(self.trained, why)
        self.trained = set()

    def keep_rows(self, kept: Collection[int], why: SkipReason | None) -> None:
        """Leave the other rows out; their calls are skipped, unless ``why`` is None: they have
        trained in an epoch before."""
        lost = {c for i, ids in enumerate(self.calls_of_rows) if i not in kept for c in ids}
        if why is not None:
            self.skipped |= dict.fromkeys(lost, why)
            self.trained -= lost
        before = _length_weights(self.rows, self.owners, *self.normalization)
        self.rows = [self.rows[i] for i in kept]
        self.calls_of_rows = [self.calls_of_rows[i] for i in kept]
        self.owners = [self.owners[i] for i in kept]
        after = _length_weights(self.rows, self.owners, *self.normalization)
        changed = [new / before[i] for i, new in zip(kept, after, strict=True)]
        self.rows = _weighted(self.rows, changed)

    def shrunk(self) -> int:
        """Count groups that failures and missing rewards left too small to compare.

        Groups that were too small from the start, because few rollouts called this adapter, do not
        count.
        """
        return sum(
            SkipReason.SMALL_GROUP in members and SkipReason.NO_REWARD in members
            for members in self.groups.values()
        )

    def metrics(self) -> dict[str, float]:
        """Summarize the step. Reward statistics are over rollouts that have a reward and asked the
        model, advantage statistics over trained tokens."""
        earned = {name: reward for name, reward in self.rewards.items() if reward is not None}
        scores = {name: reward for name, reward in earned.items() if name not in self.unasked}
        by_group = defaultdict[str, list[float]](list)
        for name, reward in scores.items():
            by_group[self.group_of[name]].append(reward)
        advantages = [a for row in self.rows for a in compress(row.advantages, row.mask)]
        center = fmean(advantages) if advantages else 0.0
        variance = fmean((a - center) ** 2 for a in advantages) if advantages else 0.0
        skipped = Counter(
            next(reason for reason in GROUP_REASONS if reason in members)
            for members in self.groups.values()
            if None not in members
        )
        return {
            "reward/mean": fmean(scores.values()) if scores else math.nan,
            "reward/std": pstdev(scores.values()) if scores else math.nan,
            "reward/std_over_groups": pstdev(map(fmean, by_group.values())) if scores else math.nan,
            **_means(self.of_agents),
            "reward/missing": len(self.rewards) - len(earned),
            "reward/without_call": len(self.unasked),
            "reward/unclaimed": self.unclaimed.total(),
            "advantage/max": max(advantages, default=0.0),
            "advantage/min": min(advantages, default=0.0),
            "advantage/std": math.sqrt(variance),
            "groups/used": len(self.groups) - skipped.total(),
            "groups/skipped": skipped.total(),
            **{f"groups/{reason}": skipped[reason] for reason in GROUP_REASONS},
            **{f"off_policy/{how}": count for how, count in sorted(self.off_policy.items())},
        }


def assemble(
    rollouts: Sequence[Rollout],
    calls: Sequence[Call],
    rewards: Sequence[Reward],
    settings: StepSettings,
    context: Sequence[Call] | None = None,
) -> StepBatch:
    """Judge every call of a step's finished rollouts, and build the rows of those that train.

    Rows come in the order of ``rollouts``, so that equal records make equal batches.

    Args:
        context: all calls of these rollouts, if ``calls`` are only some. They are not judged; they
            tell when a reward was earned.
    """
    batch = StepBatch(rewards=rollout_rewards(rollouts, rewards))
    batch.group_of = {rollout.id: rollout.group_id for rollout in rollouts}
    every = calls if context is None else context
    members, batch.skipped = members_of(
        rollouts, calls, rewards, settings, every, settings.trajectories
    )
    for member in members:
        if member.agent:
            batch.of_agents.setdefault(member.agent, {})[member.rollout.id] = member.total
    credit, reasons = _credit(members, batch, settings)
    batch.normalization = settings.length_normalization, settings.length_constant
    for member, reason in zip(members, reasons, strict=True):
        if reason is SkipReason.NO_REWARD and member.rewards:
            reason = SkipReason.REFUSED_REWARD
        if reason is not None:
            batch.skipped |= {call.id: reason for call in member.turns}
            continue
        batch.trained |= {call.id for call in member.turns}
        batch.off_policy.update(how for call in member.turns for how in _deviations(call))
        batch.rows += [_row(path, member, credit, settings) for path in member.trajectories]
        batch.calls_of_rows += [path.call_ids for path in member.trajectories]
        batch.owners += [member.rollout.id] * len(member.trajectories)
    batch.rows = normalize_lengths(batch.rows, batch.owners, *batch.normalization)
    return batch


def normalize_lengths(
    rows: Sequence[TrainingRow],
    owners: Sequence[str],
    how: LengthNormalization,
    constant: int = 1024,
) -> list[TrainingRow]:
    """Weight each token, such that the learner's mean over tokens becomes the mean of ``how``.

    token: over all tokens of the step (DAPO, arXiv:2503.14476, equation 8); no weights needed.
    sequence: over rows, of the mean over each one's tokens (GRPO, arXiv:2402.03300).
    rollout: the same with all rows of a rollout taken together; ``owners`` names each row's.
    constant: over rollouts, of the sum over tokens divided by ``constant`` (Dr. GRPO,
    arXiv:2503.20783), so that length has no influence.
    """
    return _weighted(rows, _length_weights(rows, owners, how, constant))


def _length_weights(
    rows: Sequence[TrainingRow], owners: Sequence[str], how: LengthNormalization, constant: int
) -> list[float]:
    """Return the weight of each row's tokens; see ``normalize_lengths``."""
    if how == "token":
        return [1.0] * len(rows)
    of_owner: Counter[str] = Counter()
    for row, owner in zip(rows, owners, strict=True):
        of_owner[owner] += row.trained
    total = of_owner.total()
    weights: list[float] = []
    for row, owner in zip(rows, owners, strict=True):
        share = {
            "sequence": len(rows) * row.trained,
            "rollout": len(of_owner) * of_owner[owner],
            "constant": len(of_owner) * constant,
        }[how]
        weights.append(total / share)
    return weights


def _weighted(rows: Sequence[TrainingRow], factors: Sequence[float]) -> list[TrainingRow]:
    if all(factor == 1.0 for factor in factors):
        return list(rows)
    weights = [
        [weight * factor for weight in row.extra.get("weights", [1.0] * len(row.tokens))]
        for row, factor in zip(rows, factors, strict=True)
    ]
    return with_extra(rows, weights=weights)


def _credit(
    members: Sequence[Member], batch: StepBatch, settings: StepSettings
) -> tuple[dict[str, float], list[SkipReason | None]]:
    """Compare each member with its group; fills ``batch.groups``.

    Returns advantages by call id, and why each member does not train.
    """
    groups: dict[str, list[int]] = {}
    for at, member in enumerate(members):
        groups.setdefault(member.group, []).append(at)
    found = _compared([[members[at] for at in group] for group in groups.values()], settings)
    credit: dict[str, float] = {}
    reasons: list[SkipReason | None] = [None] * len(members)
    for (name, group), result in zip(groups.items(), found, strict=True):
        batch.groups[name] = result.skipped
        for at, reason, values in zip(group, result.skipped, result.advantages, strict=True):
            reasons[at] = reason
            turns = members[at].turns
            credit |= {call.id: value for call, value in zip(turns, values, strict=False)}
    return credit, reasons


def _compared(groups: Sequence[list[Member]], settings: StepSettings) -> list[TurnAdvantages]:
    if (own := settings.own) is not None:
        return [own_advantages(group, own, settings.min_group) for group in groups]
    if settings.estimator in BY_TURN:
        return [_judge_turns(group, settings) for group in groups]
    judged = [_judge(group, settings) for group in groups]
    if settings.estimator in ESTIMATORS and ESTIMATORS[settings.estimator].whitens:
        judged = whiten_groups(judged, settings.scaling)
    return [
        TurnAdvantages(
            [[a or 0.0] * len(m.turns) for m, a in zip(group, whole.advantages, strict=True)],
            whole.skipped,
        )
        for group, whole in zip(groups, judged, strict=True)
    ]


def _judge(group: Sequence[Member], settings: StepSettings) -> GroupAdvantages:
    totals = [member.total for member in group]
    if settings.estimator in BY_TOKEN:  # the learner computes each token's advantage later
        zeros = [None if total is None else 0.0 for total in totals]
        return GroupAdvantages(zeros, [member_reason(zero, None) for zero in zeros])
    return group_advantages(totals, settings)


def _judge_turns(group: Sequence[Member], settings: StepSettings) -> TurnAdvantages:
    earned = [
        None
        if m.total is None
        # A member none of whose calls trains still tells what the group earned.
        else turn_rewards(m.rewards, m.calls, [call.id for call in m.turns]) or [m.total]
        for m in group
    ]
    if settings.estimator == "turn":
        return turn_advantages(earned, settings)
    states = [anchor_states(m.turns) or [m.rollout.id] for m in group]
    return state_advantages(earned, states, settings)


def _row(
    path: Trajectory, member: Member, credit: Mapping[str, float], settings: StepSettings
) -> TrainingRow:
    extra: dict[str, list[float]] = {}
    if settings.estimator in BY_TOKEN:
        # Each turn's reward stands at its last token. A branch that began later has no share in
        # what was earned before it.
        earned = turn_rewards(member.rewards, member.calls, path.call_ids, whole=False)
        extra["rewards"] = [0.0] * len(path.tokens)
        for call, value in zip(path.calls, earned, strict=True):
            extra["rewards"][len(call.prompt_ids) + len(call.response_ids) - 1] = value
    temperatures = {call.id: temperature_of(call) for call in path.calls}
    if any(value != 1.0 for value in temperatures.values()):
        extra["temperature"] = path.spread(temperatures, elsewhere=1.0)
    if settings.off_policy == "weight":
        extra["weights"] = path.spread(
            {call.id: importance_weight(call) or 0.0 for call in path.calls}
        )
    return to_training_row(path, credit, extra)


def _means(of_agents: Mapping[str, Mapping[str, float | None]]) -> dict[str, float]:
    known = {
        agent: [reward for reward in earned.values() if reward is not None]
        for agent, earned in sorted(of_agents.items())
    }
    return {f"reward/mean/{agent}": fmean(rewards) for agent, rewards in known.items() if rewards}


def _deviations(call: Call) -> list[str]:
    warm = "temperature" if temperature_of(call) != 1.0 else None
    mixed = "mixed_versions" if call.params.get("mixed_versions") else None
    return [how for how in (sampled_otherwise(call), warm, mixed) if how is not None]
