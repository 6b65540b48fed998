"""From the rewards of a group to the advantage of each of its rollouts, turns or tokens.

Knows numbers only: no models, no calls, no torch. A missing reward is not zero: it leaves the
group, with its reason. A group that teaches nothing (every member earned the same) is skipped
rather than trained with zeros, so that it does not dilute the normalisation of the step.

Three granularities, from the same rewards:

    one number a rollout    ``ESTIMATORS``: group_advantages, then whiten_groups for reinforce++
    one number a turn       turn_advantages, anchor_advantages (GiGPO)
    one number a token      token_advantages (GAE), from a value function's predictions
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

from agentrl_tracer.schemas import SkipReason


@dataclass(frozen=True, slots=True)
class GroupAdvantages:
    """Both lists run parallel to the rewards. A member trains exactly where ``skipped`` is None.

    ``advantages`` is None only for NO_REWARD; the other skipped members have advantage 0.
    """

    advantages: list[float | None]
    skipped: list[SkipReason | None]


@dataclass(frozen=True, slots=True)
class Scaling:
    """Division by a standard deviation: x / (std + epsilon), std with n - ddof in its denominator.

    ddof 1 and TRL's epsilon of 1e-4 are what GRPO implementations commonly do; GRPO's paper names
    neither.
    """

    ddof: int = 1
    epsilon: float = 1e-6

    def __post_init__(self) -> None:
        if self.ddof not in (0, 1) or not 0 <= self.epsilon < math.inf:
            raise ValueError(f"ddof must be 0 or 1, epsilon a finite number from 0 on: {self}")

    def divisor(self, values: Sequence[float]) -> float:
        """std + epsilon; 1 where there are too few values for a deviation."""
        if len(values) <= self.ddof:
            return 1.0
        mean = math.fsum(values) / len(values)
        squares = math.fsum((value - mean) ** 2 for value in values)
        return math.sqrt(squares / (len(values) - self.ddof)) + self.epsilon


@dataclass(frozen=True, slots=True)
class Estimator:
    """How scores become advantages. ``compares``: its baseline is the rest of the group, so one
    member alone, or members that all earned the same, carry no signal. ``scales``: whether a
    division by the group's standard deviation is compatible with it. ``whitens``: it divides by the
    standard deviation of the whole step (``whiten_groups``)."""

    advantages: Callable[[Sequence[float]], list[float]]
    compares: bool
    scales: bool = False
    whitens: bool = False


def grpo(scores: Sequence[float]) -> list[float]:
    """Reward minus the group's mean: DeepSeekMath, arXiv:2402.03300, section 4.1.

    Without the division by the standard deviation, which overweights groups that are nearly
    always right or nearly always wrong: Dr. GRPO, arXiv:2503.20783. ``normalize_std`` restores it.
    """
    mean = math.fsum(scores) / len(scores)
    return [score - mean for score in scores]


def rloo(scores: Sequence[float]) -> list[float]:
    """Reward minus the mean of the *other* members, an unbiased baseline: RLOO, arXiv:2402.14740.

    It equals ``grpo`` times n / (n - 1).
    """
    total, others = math.fsum(scores), len(scores) - 1
    return [score - (total - score) / others for score in scores]


def maxrl(scores: Sequence[float]) -> list[float]:
    """Centred, then divided by the group's *mean*: MaxRL, arXiv:2602.02710.

    For rewards from 0 to 1 this is the gradient of a truncated series of the log of the success
    probability, that is of maximum likelihood: rare successes count more. Raises ValueError for
    negative rewards, for which it means nothing.
    """
    if min(scores) < 0:
        raise ValueError(
            f"maxrl takes rewards that are not negative (successes), got {min(scores)}: shift the "
            "rewards, or choose grpo"
        )
    mean = math.fsum(scores) / len(scores)
    return [(score - mean) / mean for score in scores]


def reinforce(scores: Sequence[float]) -> list[float]:
    """The reward itself, no baseline: Williams 1992, doi:10.1007/BF00992696."""
    return list(scores)


ESTIMATORS: dict[str, Estimator] = {
    "grpo": Estimator(grpo, compares=True, scales=True),
    # Dr. GRPO, arXiv:2503.20783: the same advantages, never scaled; its other half is the constant
    # length normalisation.
    "dr_grpo": Estimator(grpo, compares=True),
    "rloo": Estimator(rloo, compares=True, scales=True),
    # REINFORCE++-baseline, arXiv:2501.03262: the group's mean, then the step's deviation.
    "reinforce++": Estimator(grpo, compares=True, whitens=True),
    "maxrl": Estimator(maxrl, compares=True),
    "reinforce": Estimator(reinforce, compares=False),
}


def group_advantages(
    rewards: Sequence[float | None],
    *,
    estimator: str = "grpo",
    normalize_std: bool = False,
    scaling: Scaling | None = None,
    min_group: int = 2,
) -> GroupAdvantages:
    """Advantages of one group. A reward that is None, or not a finite number, counts as missing."""
    if estimator not in ESTIMATORS:
        raise ValueError(f"unknown estimator {estimator!r}: choose one of {sorted(ESTIMATORS)}")
    how = ESTIMATORS[estimator]
    if normalize_std and not how.scales:
        raise ValueError(
            f"normalize_std does not apply to {estimator!r}: it has "
            + ("a normalisation of its own" if how.compares else "no group baseline")
        )

    scores = [r for r in rewards if r is not None and math.isfinite(r)]
    reason, values = _judge_group(scores, how, min_group)
    if reason is None and normalize_std:
        divisor = (scaling or Scaling()).divisor(scores)
        values = [value / divisor for value in values]

    advantages: list[float | None] = []
    skipped: list[SkipReason | None] = []
    scored = iter(values)
    for reward in rewards:
        if reward is None or not math.isfinite(reward):
            advantages.append(None)
            skipped.append(SkipReason.NO_REWARD)
            continue
        advantage = next(scored)
        advantages.append(advantage)
        # Without a baseline a single member can have nothing to learn while its group has.
        nothing = not how.compares and advantage == 0.0
        skipped.append(SkipReason.ZERO_ADVANTAGE if nothing else reason)
    return GroupAdvantages(advantages, skipped)


def whiten_groups(
    groups: Sequence[GroupAdvantages], scaling: Scaling | None = None
) -> list[GroupAdvantages]:
    """Centre and scale over all rollouts of the step that train: REINFORCE++, arXiv:2501.03262.

    Skipped groups have no part in the mean and the deviation. A step of one rollout is left as is.
    """
    training = [
        advantage
        for group in groups
        for advantage, reason in zip(group.advantages, group.skipped, strict=True)
        if advantage is not None and reason is None
    ]
    if len(training) < 2:
        return list(groups)
    mean, divisor = math.fsum(training) / len(training), (scaling or Scaling()).divisor(training)
    return [
        replace(
            group,
            advantages=[
                (advantage - mean) / divisor
                if advantage is not None and reason is None
                else advantage
                for advantage, reason in zip(group.advantages, group.skipped, strict=True)
            ],
        )
        for group in groups
    ]


# ---- one number a turn


@dataclass(frozen=True, slots=True)
class TurnAdvantages:
    """For each member, an advantage for each of its turns, and why it does not train (or None)."""

    advantages: list[list[float]]
    skipped: list[SkipReason | None]


def discounted_returns(rewards: Sequence[float], discount: float) -> list[float]:
    """What is still to come at each turn, its own reward included: G_k = r_k + discount * G_k+1
    (Sutton and Barto 2018, Reinforcement Learning, equation 3.9)."""
    returns: list[float] = []
    following = 0.0
    for reward in reversed(rewards):
        following = reward + discount * following
        returns.append(following)
    return returns[::-1]


def turn_advantages(
    rewards: Sequence[Sequence[float] | None],
    *,
    discount: float = 1.0,
    normalize_std: bool = False,
    scaling: Scaling | None = None,
    min_group: int = 2,
) -> TurnAdvantages:
    """Credit by turn: a turn's discounted return, against the same turn of the other members.

    ``rewards``: each member's rewards by turn, None for a member without any reward. The baseline
    of turn k is the mean return over the members that got as far (turn-level GRPO: MT-GRPO,
    arXiv:2505.11821, in whose terms each turn is a state of its own). A turn that only one member
    reached is measured against the group's mean return from the start, which no action of that turn
    had a part in.
    """
    returns = [None if r is None else discounted_returns(r, discount) for r in rewards]
    scored = [member for member in returns if member]
    starts = [member[0] for member in scored]
    advantages: list[list[float]] = []
    for member in returns:
        turns: list[float] = []
        for k, value in enumerate(member or ()):
            peers = [other[k] for other in scored if k < len(other)]
            if len(peers) < 2:
                peers = starts
            divisor = (scaling or Scaling()).divisor(peers) if normalize_std else 1.0
            turns.append(_centred(value, peers) / divisor)
        advantages.append(turns)
    return _judge_turns(rewards, advantages, min_group)


def anchor_advantages(
    rewards: Sequence[Sequence[float] | None],
    anchors: Sequence[Sequence[Hashable]],
    *,
    discount: float = 1.0,
    step_weight: float = 1.0,
    normalize_std: bool = False,
    scaling: Scaling | None = None,
    min_group: int = 2,
) -> TurnAdvantages:
    """Two levels of groups: GiGPO, arXiv:2505.10978, equations 3, 7 and 8.

    A turn's advantage is its rollout's within the group, plus ``step_weight`` times that of its
    discounted return among all turns of the group which started from the same state (equal
    ``anchors``, parallel to ``rewards``). A state met once has no second part.
    """
    totals = [None if r is None else math.fsum(r) for r in rewards]
    earned = [total for total in totals if total is not None]
    scale = scaling or Scaling()
    returns = [None if r is None else discounted_returns(r, discount) for r in rewards]
    met: dict[Hashable, list[float]] = {}
    for member, states in zip(returns, anchors, strict=True):
        for value, state in zip(member or (), states if member else (), strict=True):
            met.setdefault(state, []).append(value)

    def relative(value: float, among: Sequence[float]) -> float:
        return _centred(value, among) / (scale.divisor(among) if normalize_std else 1.0)

    advantages: list[list[float]] = []
    for total, member, states in zip(totals, returns, anchors, strict=True):
        if total is None or member is None:
            advantages.append([])
            continue
        whole = relative(total, earned)
        advantages.append(
            [
                whole + step_weight * relative(value, met[state])
                for value, state in zip(member, states, strict=True)
            ]
        )
    return _judge_turns(rewards, advantages, min_group)


def _centred(value: float, among: Sequence[float]) -> float:
    """0 up to float noise if all are the same: see ``_all_equal``."""
    return 0.0 if _all_equal(among) else value - math.fsum(among) / len(among)


def _judge_turns(
    rewards: Sequence[Sequence[float] | None], advantages: list[list[float]], min_group: int
) -> TurnAdvantages:
    reason: SkipReason | None = None
    if sum(member is not None for member in rewards) < max(min_group, 2):
        reason = SkipReason.SMALL_GROUP
    elif not any(value for turns in advantages for value in turns):
        reason = SkipReason.ZERO_ADVANTAGE
    if reason is not None:
        advantages = [[0.0] * len(turns) for turns in advantages]
    skipped = [SkipReason.NO_REWARD if member is None else reason for member in rewards]
    return TurnAdvantages(advantages, skipped)


# ---- one number a token


def token_advantages(
    rewards: Sequence[float], values: Sequence[float], *, discount: float, trace: float
) -> tuple[list[float], list[float]]:
    """Generalised advantage estimation and the returns a value function should predict:
    arXiv:1506.02438, equations 11, 12 and 16.

    ``rewards[t]`` is earned with token t, ``values[t]`` predicted before it; nothing follows the
    last. ``trace`` is lambda: 0 trusts the value function, 1 the rewards.
    """
    advantages: list[float] = []
    advantage = following = 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        surprise = reward + discount * following - value
        advantage = surprise + discount * trace * advantage
        advantages.append(advantage)
        following = value
    advantages.reverse()
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


# ---- inside


def _judge_group(
    scores: Sequence[float], how: Estimator, min_group: int
) -> tuple[SkipReason | None, list[float]]:
    """Why the whole group is skipped (or None), and its advantages (zeros if it is)."""
    # A comparison with nobody is not one, whatever the configuration says.
    needed = max(min_group, 2) if how.compares else 1
    if len(scores) < needed:
        return SkipReason.SMALL_GROUP, [0.0] * len(scores)
    if how.compares and _all_equal(scores):
        return SkipReason.ZERO_ADVANTAGE, [0.0] * len(scores)
    return None, how.advantages(scores)


def _all_equal(scores: Sequence[float]) -> bool:
    """Equal up to float noise: a sum of rewards may come out as 0.1 + 0.2 here and 0.3 there."""
    largest = max(abs(score) for score in scores)
    return max(scores) - min(scores) <= max(1e-12, 1e-9 * largest)
