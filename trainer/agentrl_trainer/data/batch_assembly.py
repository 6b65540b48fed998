"""From the records of one step to what the learner trains on, and a verdict on every call.

Pure: rollouts, calls and rewards in; datums and verdicts out. Here the contract "each call is
trained on, or skipped with one reason" is kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, pstdev
from typing import Literal

from agentrl_tracer.schemas import Call, Reward, Rollout, RolloutState, SkipReason
from agentrl_trainer.data.advantages import (
    ESTIMATORS,
    GroupAdvantages,
    Scaling,
    anchor_advantages,
    group_advantages,
    turn_advantages,
    whiten_groups,
)
from agentrl_trainer.data.packing import TrainingRow, to_training_row
from agentrl_trainer.data.rewards import rollout_rewards, turn_rewards, winning_rewards
from agentrl_trainer.data.state_grouping import anchor_states
from agentrl_trainer.data.trajectories import (
    Rules,
    Trajectory,
    build_trajectories,
    importance,
    sampled_otherwise,
    temperature_of,
)

LengthNormalization = Literal["token", "sequence", "constant", "rollout"]
BY_TURN = ("turn", "gigpo")
BY_TOKEN = ("gae",)  # credit comes from a value function: see values.with_gae

_GROUP_REASONS = (SkipReason.SMALL_GROUP, SkipReason.ZERO_ADVANTAGE, SkipReason.NO_REWARD)


@dataclass(frozen=True, slots=True)
class StepSettings:
    """How records become datums."""

    adapters: frozenset[str]  # those in training
    max_length: int  # tokens of a trajectory
    estimator: str = "grpo"  # one of ESTIMATORS, BY_TURN or BY_TOKEN
    normalize_std: bool = False
    min_group: int = 2
    scaling: Scaling = field(default_factory=Scaling)  # of normalize_std and of reinforce++
    discount: float = 1.0  # of later turns' rewards; for BY_TURN
    step_weight: float = 1.0  # of GiGPO's second level
    length_normalization: LengthNormalization = "token"
    length_constant: int = 1024  # tokens; for length_normalization constant
    rules: Rules = field(default_factory=Rules)
    oldest_version: int | None = None  # of an adapter: what an older one answered is stale


@dataclass(slots=True)
class StepBatch:
    """Invariant: each call of the step is in ``trained`` or in ``skipped``, never in both."""

    datums: list[TrainingRow] = field(default_factory=list[TrainingRow])
    trained: set[str] = field(default_factory=set[str])
    skipped: dict[str, SkipReason] = field(default_factory=dict[str, SkipReason])
    rewards: dict[str, float | None] = field(default_factory=dict[str, float | None])
    """By rollout id; None where a rollout failed or emitted none."""
    groups: dict[str, GroupAdvantages] = field(default_factory=dict[str, GroupAdvantages])
    """With credit by turn, a member's advantage here is the mean over its turns."""
    off_policy: Counter[str] = field(default_factory=Counter[str])
    """Trained calls that were not sampled from the policy at temperature 1, by how; and
    mixed_versions."""

    def refuse(self, reason: SkipReason) -> None:
        """The learner refused the step: nothing in it was trained on."""
        self.skipped |= dict.fromkeys(self.trained, reason)
        self.trained = set()

    def shrunk(self) -> int:
        """Groups that failures and missing rewards left too small to compare. Not those that were
        so to begin with, because few rollouts asked this adapter at all."""
        return sum(
            SkipReason.SMALL_GROUP in group.skipped and SkipReason.NO_REWARD in group.skipped
            for group in self.groups.values()
        )

    def _groups_skipped(self) -> Counter[SkipReason]:
        """Each group of which nobody trains, by the one reason why."""
        skipped = [
            {reason for reason in group.skipped if reason is not None}
            for group in self.groups.values()
            if None not in group.skipped
        ]
        # Who has no reward left the group; why the others do not train is the group's reason.
        return Counter(
            next((why for why in _GROUP_REASONS if why in reasons), SkipReason.NO_REWARD)
            for reasons in skipped
        )

    def metrics(self) -> dict[str, float]:
        """The step in numbers. Reward statistics are over rollouts that have a reward, advantage
        statistics over trained tokens."""
        scores = [reward for reward in self.rewards.values() if reward is not None]
        advantages = trained_advantages(self.datums)
        skipped = self._groups_skipped()
        used = [g for g in self.groups.values() if any(reason is None for reason in g.skipped)]
        return {
            "reward/mean": fmean(scores) if scores else float("nan"),
            "reward/std": pstdev(scores) if scores else float("nan"),
            "reward/missing": len(self.rewards) - len(scores),
            "advantage/max": max(advantages, default=0.0),
            "advantage/min": min(advantages, default=0.0),
            "advantage/std": Scaling(0, 0.0).divisor(advantages) if advantages else 0.0,
            "groups/used": len(used),
            "groups/skipped": len(self.groups) - len(used),
            # Why: a group is too small, all its members earned the same, or none has a reward.
            **{f"groups/{reason}": skipped[reason] for reason in _GROUP_REASONS},
            **{f"off_policy/{how}": count for how, count in sorted(self.off_policy.items())},
        }


def trained_advantages(datums: Sequence[TrainingRow]) -> list[float]:
    """Of every trained token."""
    return [
        advantage
        for datum in datums
        for advantage, on in zip(datum.advantages, datum.mask, strict=True)
        if on
    ]


@dataclass(frozen=True, slots=True)
class _Member:
    """One rollout of a group: its winning attempt's calls and what it earned with them."""

    rollout: Rollout
    calls: list[Call]  # of the winning attempt, in order
    rewards: list[Reward]
    trajectories: list[Trajectory]
    total: float | None

    @property
    def turns(self) -> list[Call]:
        """The calls that train, in order."""
        training = {call for t in self.trajectories for call in t.call_ids}
        return [call for call in self.calls if call.id in training]


def assemble(
    rollouts: Sequence[Rollout],
    calls: Sequence[Call],
    rewards: Sequence[Reward],
    settings: StepSettings,
    context: Sequence[Call] | None = None,
) -> StepBatch:
    """Judges every call of a step's finished rollouts and builds the datums of those that train.

    Datums come in the order of ``rollouts``, so that equal records make equal batches.

    Args:
        context: all calls of these rollouts, where ``calls`` are only some. Not judged; they tell
            when a reward was earned.
    """
    batch = StepBatch()
    calls_of = _by_rollout(calls)
    all_calls_of = calls_of if context is None else _by_rollout(context)
    rewards_of: dict[str, list[Reward]] = {}
    for reward in rewards:
        rewards_of.setdefault(reward.rollout_id, []).append(reward)

    batch.rewards = rollout_rewards(rollouts, rewards)
    members = [
        _member(
            rollout,
            calls_of.get(rollout.id, []),
            all_calls_of.get(rollout.id, []),
            rewards_of.get(rollout.id, []),
            batch,
            settings,
        )
        for rollout in rollouts
    ]
    credit = _credit(members, batch, settings)
    owners: list[str] = []
    for member in members:
        advantage, group_reason = credit[member.rollout.id]
        by_id = {call.id: call for call in member.calls}
        for trajectory in member.trajectories:
            if group_reason is not None:
                batch.skipped |= dict.fromkeys(trajectory.call_ids, group_reason)
                continue
            batch.trained |= set(trajectory.call_ids)
            batch.off_policy.update(
                how for call in trajectory.call_ids for how in _oddities(by_id[call])
            )
            datum = to_training_row(trajectory, advantage)
            extra: dict[str, list[float]] = {}
            if settings.estimator in BY_TOKEN:
                extra["rewards"] = _token_rewards(trajectory, member)
            if any(value != 1.0 for value in trajectory.temperatures):
                extra["temperature"] = trajectory.temperatures
            if settings.rules.off_policy == "weight":
                weights = {call: importance(by_id[call]) or 0.0 for call in trajectory.call_ids}
                extra["weights"] = to_training_row(trajectory, weights).advantages
            batch.datums.append(replace(datum, extra=extra))
            owners.append(member.rollout.id)
    batch.datums = normalize_lengths(
        batch.datums, owners, settings.length_normalization, settings.length_constant
    )
    return batch


def normalize_lengths(
    datums: Sequence[TrainingRow],
    owners: Sequence[str],
    how: LengthNormalization,
    constant: int = 1024,
) -> list[TrainingRow]:
    """Give each token its ``weights``, such that the sum over tokens divided by their number (which
    is what the learner does) is the mean that ``how`` says.

    token: over all tokens of the step (DAPO, arXiv:2503.14476, equation 8); no weights needed.
    sequence: over sequences, of the mean over each one's tokens (GRPO, arXiv:2402.03300).
    rollout: the same with all sequences of a rollout taken together; ``owners`` says whose each is.
    constant: over rollouts, of the sum over tokens divided by ``constant`` (Dr. GRPO,
    arXiv:2503.20783), so that length has no influence at all.
    """
    if how == "token":
        return list(datums)
    lengths = [datum.trained for datum in datums]
    total = sum(lengths)
    of_owner: Counter[str] = Counter()
    for owner, length in zip(owners, lengths, strict=True):
        of_owner[owner] += length
    result: list[TrainingRow] = []
    for datum, owner, length in zip(datums, owners, lengths, strict=True):
        share = {
            "sequence": len(datums) * length,
            "rollout": len(of_owner) * of_owner[owner],
            "constant": len(of_owner) * constant,
        }[how]
        before = datum.extra.get("weights", [1.0] * len(datum.tokens))
        weights = [weight * total / share for weight in before]
        result.append(replace(datum, extra={**datum.extra, "weights": weights}))
    return result


_Credit = tuple[float | Mapping[str, float], SkipReason | None]


def _credit(
    members: Sequence[_Member], batch: StepBatch, settings: StepSettings
) -> dict[str, _Credit]:
    """Each rollout's advantage within its group, one or one for each call; or why it has none."""
    groups: dict[str, list[_Member]] = {}
    for member in members:
        groups.setdefault(member.rollout.group_id, []).append(member)
    if settings.estimator in BY_TURN:
        return {
            name: credit
            for group_id, group in groups.items()
            for name, credit in _credit_by_turn(group_id, group, batch, settings).items()
        }
    judged = {group_id: _judge(group, settings) for group_id, group in groups.items()}
    how = ESTIMATORS.get(settings.estimator)
    if how is not None and how.whitens:
        done = whiten_groups(list(judged.values()), settings.scaling)
        judged = dict(zip(judged, done, strict=True))
    batch.groups = judged
    return {
        member.rollout.id: (advantage or 0.0, reason)
        for group_id, group in groups.items()
        for member, advantage, reason in zip(
            group, judged[group_id].advantages, judged[group_id].skipped, strict=True
        )
    }


def _judge(group: Sequence[_Member], settings: StepSettings) -> GroupAdvantages:
    totals = [member.total for member in group]
    if settings.estimator in BY_TOKEN:
        # Whoever has a reward trains; what each token's advantage is, the learner finds out.
        return GroupAdvantages(
            [None if total is None else 0.0 for total in totals],
            [SkipReason.NO_REWARD if total is None else None for total in totals],
        )
    return group_advantages(
        totals,
        estimator=settings.estimator,
        normalize_std=settings.normalize_std,
        scaling=settings.scaling,
        min_group=settings.min_group,
    )


def _credit_by_turn(
    group_id: str, group: Sequence[_Member], batch: StepBatch, settings: StepSettings
) -> dict[str, _Credit]:
    turns = [member.turns for member in group]
    earned = [
        None
        if member.total is None
        # A member none of whose calls trains still says what the group earned.
        else turn_rewards(member.rewards, member.calls, [call.id for call in own]) or [member.total]
        for member, own in zip(group, turns, strict=True)
    ]
    if settings.estimator == "turn":
        result = turn_advantages(
            earned,
            discount=settings.discount,
            normalize_std=settings.normalize_std,
            scaling=settings.scaling,
            min_group=settings.min_group,
        )
    else:
        result = anchor_advantages(
            earned,
            [
                anchor_states(own) or [member.rollout.id]
                for member, own in zip(group, turns, strict=True)
            ],
            discount=settings.discount,
            step_weight=settings.step_weight,
            normalize_std=settings.normalize_std,
            scaling=settings.scaling,
            min_group=settings.min_group,
        )
    batch.groups[group_id] = GroupAdvantages(
        [
            None if member.total is None else fmean(own) if own else 0.0
            for member, own in zip(group, result.advantages, strict=True)
        ],
        result.skipped,
    )
    return {
        member.rollout.id: (
            {call.id: value for call, value in zip(own, values, strict=False)},
            reason,
        )
        for member, own, values, reason in zip(
            group, turns, result.advantages, result.skipped, strict=True
        )
    }


def _token_rewards(trajectory: Trajectory, member: _Member) -> list[float]:
    """Each turn's reward at its last token. A branch that began later has no part in what was
    earned before it."""
    earned = turn_rewards(member.rewards, member.calls, trajectory.call_ids, whole=False)
    rewards = [0.0] * len(trajectory.tokens)
    for turn, value in zip(trajectory.turns, earned, strict=True):
        rewards[turn.end - 1] = value
    return rewards


def _oddities(call: Call) -> list[str]:
    found = {
        sampled_otherwise(call): True,
        "temperature": temperature_of(call) != 1.0,
        "mixed_versions": bool(call.params.get("mixed_versions")),
    }
    return [how for how, applies in found.items() if how is not None and applies]


def _of_winner(rollout: Rollout, calls: Sequence[Call]) -> list[Call]:
    return [call for call in calls if rollout.winner and call.attempt_id == rollout.winner]


def _by_rollout(calls: Sequence[Call]) -> dict[str | None, list[Call]]:
    found: dict[str | None, list[Call]] = {}
    for call in calls:
        found.setdefault(call.rollout_id, []).append(call)
    return found


def _member(
    rollout: Rollout,
    calls: Sequence[Call],
    context: Sequence[Call],
    rewards: Sequence[Reward],
    batch: StepBatch,
    settings: StepSettings,
) -> _Member:
    """The winning attempt's trajectories; all that falls away is noted in ``batch.skipped``."""
    lost = (
        SkipReason.FAILED_ATTEMPT
        if rollout.state is RolloutState.SUCCEEDED
        else SkipReason.FAILED_ROLLOUT
    )
    winning = _of_winner(rollout, calls)
    won = {call.id for call in winning}
    for call in calls:
        if call.id not in won:
            batch.skipped[call.id] = call.skip_reason or lost
    built = build_trajectories(
        winning,
        max_length=settings.max_length,
        adapters=settings.adapters,
        oldest_version=None
        if settings.oldest_version is None
        else dict.fromkeys(settings.adapters, settings.oldest_version),
        rules=settings.rules,
    )
    batch.skipped |= built.skipped
    return _Member(
        rollout=rollout,
        calls=sorted(_of_winner(rollout, context), key=lambda c: (c.seq, c.choice, c.id)),
        rewards=winning_rewards(rollout, rewards),
        trajectories=built.trajectories,
        total=batch.rewards[rollout.id],
    )
