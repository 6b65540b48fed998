"""From the rewards of a group to the advantage of each of its rollouts.

Knows numbers only: no models, no tokens, no torch. A missing reward is not zero: it leaves the
group, with its reason. A group that teaches nothing (every member earned the same) is skipped
rather than trained with zeros, so that it does not dilute the normalisation of the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agentrl_tracer.schemas import SkipReason


@dataclass(frozen=True, slots=True)
class GroupAdvantages:
    """Both lists run parallel to the rewards. A member trains exactly where ``skipped`` is None.

    ``advantages`` is None only for NO_REWARD; the other skipped members have advantage 0.
    """

    advantages: list[float | None]
    skipped: list[SkipReason | None]


@dataclass(frozen=True, slots=True)
class Estimator:
    """How scores become advantages. ``compares``: its baseline is the rest of the group, so one
    member alone, or members that all earned the same, carry no signal."""

    advantages: Callable[[Sequence[float]], list[float]]
    compares: bool


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


def reinforce(scores: Sequence[float]) -> list[float]:
    """The reward itself, no baseline: Williams 1992, doi:10.1007/BF00992696."""
    return list(scores)


ESTIMATORS: dict[str, Estimator] = {
    "grpo": Estimator(grpo, compares=True),
    "rloo": Estimator(rloo, compares=True),
    "reinforce": Estimator(reinforce, compares=False),
}


def group_advantages(
    rewards: Sequence[float | None],
    *,
    estimator: str = "grpo",
    normalize_std: bool = False,
    min_group: int = 2,
) -> GroupAdvantages:
    """Advantages of one group. A reward that is None, or not a finite number, counts as missing."""
    if estimator not in ESTIMATORS:
        raise ValueError(f"unknown estimator {estimator!r}: choose one of {sorted(ESTIMATORS)}")
    how = ESTIMATORS[estimator]
    if normalize_std and not how.compares:
        raise ValueError(f"normalize_std does not apply to {estimator!r}: it has no group baseline")

    scores = [r for r in rewards if r is not None and math.isfinite(r)]
    reason, values = _judge_group(scores, how, min_group)
    if reason is None and normalize_std:
        deviation = _sample_std(scores)
        values = [value / deviation for value in values]

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


def _sample_std(scores: Sequence[float]) -> float:
    mean = math.fsum(scores) / len(scores)
    return math.sqrt(math.fsum((s - mean) ** 2 for s in scores) / (len(scores) - 1))
