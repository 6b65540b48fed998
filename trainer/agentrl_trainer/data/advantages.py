"""Compute advantages from the rewards of a group: for each rollout, turn or token.

Knows numbers only: no models, no calls, no torch. A missing reward is not zero: its rollout leaves
the group. A group without variance is skipped instead of trained with zeros, so that it does not
dilute the normalization of the step. Three granularities:

    one number a rollout    ``ESTIMATORS``: group_advantages, then whiten_groups for reinforce++
    one number a turn       turn_advantages, state_advantages (GiGPO)
    one number a token      token_advantages (GAE), from a value function's predictions
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace

from agentrl_tracer.schemas import SkipReason
from agentrl_trainer.data.skip_reasons import group_reason, member_reason


@dataclass(frozen=True, slots=True)
class GroupAdvantages:
    """Both lists run parallel to the rewards. A member trains exactly where ``skipped`` is None.

    ``advantages`` is None only for NO_REWARD; other skipped members have advantage 0.
    """

    advantages: list[float | None]
    skipped: list[SkipReason | None]


@dataclass(frozen=True, slots=True)
class TurnAdvantages:
    """The same with an advantage for each turn of a member."""

    advantages: list[list[float]]
    skipped: list[SkipReason | None]


@dataclass(frozen=True, slots=True)
class Scaling:
    """Division by a standard deviation: x / (std + epsilon), std with n - ddof in its denominator.

    ddof 1 and TRL's epsilon of 1e-4 are common in GRPO implementations; GRPO's paper names neither.
    """

    ddof: int = 1
    epsilon: float = 1e-6

    def divisor(self, values: Sequence[float]) -> float:
        """Return std + epsilon; 1 if that is 0, or there are too few values for a deviation."""
        if len(values) <= self.ddof:
            return 1.0
        mean = _mean(values)
        squares = math.fsum((value - mean) ** 2 for value in values)
        return (math.sqrt(squares / (len(values) - self.ddof)) + self.epsilon) or 1.0


@dataclass(frozen=True, kw_only=True)
class CreditSettings:
    """How a group's rewards become advantages."""

    estimator: str = "grpo"  # one of ESTIMATORS, BY_TURN or BY_TOKEN
    normalize_std: bool = False
    min_group: int = 2
    scaling: Scaling = field(default_factory=Scaling)  # of normalize_std and of reinforce++
    discount: float = 1.0  # of later turns' rewards; for BY_TURN
    step_weight: float = 1.0  # of GiGPO's second level


@dataclass(frozen=True, slots=True)
class Estimator:
    """How scores become advantages.

    ``compares``: the baseline is the rest of the group, so that one member alone, or members with
    equal rewards, carry no signal. ``whitens``: is divided by the standard deviation of the whole
    step (``whiten_groups``). ``least``: rewards below it count as missing.
    """

    advantages: Callable[[Sequence[float]], list[float]]
    compares: bool
    whitens: bool = False
    least: float = -math.inf


def grpo(scores: Sequence[float]) -> list[float]:
    """Subtract the group's mean reward: DeepSeekMath, arXiv:2402.03300, section 4.1.

    Without the division by the standard deviation, which overweights groups that are nearly always
    right or nearly always wrong: Dr. GRPO, arXiv:2503.20783. ``normalize_std`` restores it.
    """
    mean = _mean(scores)
    return [score - mean for score in scores]


def rloo(scores: Sequence[float]) -> list[float]:
    """Subtract the mean reward of the *other* members, an unbiased baseline: arXiv:2402.14740.

    It equals ``grpo`` times n / (n - 1).
    """
    total, others = math.fsum(scores), len(scores) - 1
    return [score - (total - score) / others for score in scores]


def maxrl(scores: Sequence[float]) -> list[float]:
    """Center, then divide by the group's *mean*: MaxRL, arXiv:2602.02710.

    For rewards from 0 to 1 this is the gradient of a truncated series of the log of the success
    probability, that is, of maximum likelihood: rare successes count more. It takes no negative
    rewards.
    """
    mean = _mean(scores)
    return [(score - mean) / mean for score in scores]


def reinforce(scores: Sequence[float]) -> list[float]:
    """Take the reward itself, without a baseline: Williams 1992, doi:10.1007/BF00992696."""
    return list(scores)


ESTIMATORS: dict[str, Estimator] = {
    "grpo": Estimator(grpo, compares=True),
    # Dr. GRPO, arXiv:2503.20783: the same advantages, never scaled; its other half is the constant
    # length normalization.
    "dr_grpo": Estimator(grpo, compares=True),
    "rloo": Estimator(rloo, compares=True),
    # REINFORCE++-baseline, arXiv:2501.03262: the group's mean, then the step's deviation.
    "reinforce++": Estimator(grpo, compares=True, whitens=True),
    "maxrl": Estimator(maxrl, compares=True, least=0.0),
    "reinforce": Estimator(reinforce, compares=False),
}


BY_TURN = ("turn", "gigpo")
BY_TOKEN = ("gae",)  # credit comes from a value function: see learner.prepare_batch.with_gae


def group_advantages(rewards: Sequence[float | None], settings: CreditSettings) -> GroupAdvantages:
    """Compute the advantages of one group. Rewards that are None, or that the estimator does not
    take, count as missing."""
    how = ESTIMATORS[settings.estimator]
    known = [None if r is None or not math.isfinite(r) or r < how.least else r for r in rewards]
    scores = [r for r in known if r is not None]
    teaches = not (how.compares and scores and _all_equal(scores))
    reason = group_reason(len(scores), settings.min_group, compares=how.compares, teaches=teaches)
    values = [0.0] * len(scores) if reason else how.advantages(scores)
    if settings.normalize_std and not reason:
        divisor = settings.scaling.divisor(scores)
        values = [value / divisor for value in values]
    scored = iter(values)
    advantages = [None if reward is None else next(scored) for reward in known]
    skipped = [member_reason(value, reason, compares=how.compares) for value in advantages]
    return GroupAdvantages(advantages, skipped)


def whiten_groups(groups: Sequence[GroupAdvantages], scaling: Scaling) -> list[GroupAdvantages]:
    """Center and scale over all rollouts of the step that train: REINFORCE++, arXiv:2501.03262.

    Skipped members have no part in mean and deviation. A step of one rollout is returned as it is.
    """
    members = [zip(group.advantages, group.skipped, strict=True) for group in groups]
    training = [
        value for group in members for value, reason in group if value is not None and not reason
    ]
    if len(training) < 2:
        return list(groups)
    mean, divisor = _mean(training), scaling.divisor(training)

    def whitened(value: float | None, reason: SkipReason | None) -> float | None:
        return value if value is None or reason else (value - mean) / divisor

    return [
        replace(group, advantages=list(map(whitened, group.advantages, group.skipped)))
        for group in groups
    ]


# ---- one number a turn


def discounted_returns(rewards: Sequence[float], discount: float) -> list[float]:
    """Sum the rewards from each turn on: G_k = r_k + discount * G_k+1 (Sutton and Barto 2018,
    Reinforcement Learning, equation 3.9)."""
    returns: list[float] = []
    for reward in reversed(rewards):
        returns.append(reward + discount * (returns[-1] if returns else 0.0))
    return returns[::-1]


def turn_advantages(
    rewards: Sequence[Sequence[float] | None], settings: CreditSettings
) -> TurnAdvantages:
    """Compare a turn's discounted return with the same turn of the other members.

    ``rewards``: each member's rewards by turn; None for a member without any reward. The baseline
    of turn k is the mean return over the members that reached it (turn-level GRPO: MT-GRPO,
    arXiv:2505.11821). A turn that only one member reached is compared with the group's mean return
    from the start, on which no action of that turn had an influence.
    """
    returns = [discounted_returns(r or (), settings.discount) for r in rewards]
    starts = [member[0] for member in returns if member]

    def compared(k: int, value: float) -> float:
        peers = [member[k] for member in returns if k < len(member)]
        return _relative(value, peers if len(peers) > 1 else starts, settings)

    advantages = [[compared(k, value) for k, value in enumerate(member)] for member in returns]
    return _judged_turns(rewards, advantages, settings.min_group)


def state_advantages(
    rewards: Sequence[Sequence[float] | None],
    states: Sequence[Sequence[Hashable]],
    settings: CreditSettings,
) -> TurnAdvantages:
    """Compute advantages on two levels of groups: GiGPO, arXiv:2505.10978, equations 3, 7 and 8.

    A turn's advantage is its rollout's within the group, plus ``step_weight`` times that of its
    discounted return among all turns of the group that began in the same state (equal ``states``,
    parallel to ``rewards``). A state met once has no second part.
    """
    earned = [math.fsum(r) for r in rewards if r is not None]
    returns = [discounted_returns(r or (), settings.discount) for r in rewards]
    met: defaultdict[Hashable, list[float]] = defaultdict(list)
    for member, own in zip(returns, states, strict=True):
        for value, state in zip(member, own if member else (), strict=True):
            met[state].append(value)
    advantages: list[list[float]] = []
    for reward, member, own in zip(rewards, returns, states, strict=True):
        whole = _relative(math.fsum(reward or ()), earned, settings) if earned else 0.0
        steps = (_relative(v, met[s], settings) for v, s in zip(member, own, strict=False))
        advantages.append([whole + settings.step_weight * step for step in steps])
    return _judged_turns(rewards, advantages, settings.min_group)


def _judged_turns(
    rewards: Sequence[Sequence[float] | None], advantages: list[list[float]], min_group: int
) -> TurnAdvantages:
    scored = sum(member is not None for member in rewards)
    teaches = any(value for turns in advantages for value in turns)
    reason = group_reason(scored, min_group, compares=True, teaches=teaches)
    if reason is not None:
        advantages = [[0.0] * len(turns) for turns in advantages]
    skipped = [member_reason(None if member is None else 0.0, reason) for member in rewards]
    return TurnAdvantages(advantages, skipped)


# ---- one number a token


def token_advantages(
    rewards: Sequence[float], values: Sequence[float], *, discount: float, trace: float
) -> tuple[list[float], list[float]]:
    """Compute generalized advantage estimates, and the returns a value function should predict:
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


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _relative(value: float, among: Sequence[float], settings: CreditSettings) -> float:
    """Center ``value``, and scale it if asked; exactly 0 if it equals all of ``among``.

    It need not be one of them. If these are all equal, it is only centered.
    """
    centered = 0.0 if _all_equal([value, *among]) else value - _mean(among)
    scaled = settings.normalize_std and not _all_equal(among)
    return centered / (settings.scaling.divisor(among) if scaled else 1.0)


def _all_equal(scores: Sequence[float]) -> bool:
    """Compare up to float noise: equal sums of rewards may differ as 0.1 + 0.2 and 0.3 do."""
    largest = max(abs(score) for score in scores)
    return max(scores) - min(scores) <= max(1e-12, 1e-9 * largest)
