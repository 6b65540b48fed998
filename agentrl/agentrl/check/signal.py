"""Tell from the base model's rewards whether a comparison within groups has a signal."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from statistics import fmean

from agentrl.config.checks import compares_groups
from agentrl.config.commands import TrainConfig
from agentrl.findings import MORE_SIGNAL, Finding

WEAK_BELOW = 0.1
"""Of groups with unequal rewards: fewer make a step that learns from a tenth of its rollouts."""


def unequal_share(rewards: Sequence[float], size: int) -> float:
    """Estimate the chance that a task's group of ``size`` rollouts has unequal rewards.

    Unbiased where there are at least ``size`` samples: 1 - Σ C(n_v, size) / C(n, size) over the
    values v, as pass@k counts (Chen et al. 2021, equation 1). With fewer samples their frequencies
    are taken for the chances, which is too low.
    """
    count, values = len(rewards), Counter(rewards).values()
    if count < 2:
        return 0.0
    if count >= size:
        return 1 - sum(math.comb(one, size) for one in values) / math.comb(count, size)
    return 1 - sum((one / count) ** size for one in values)


def verdict(by_task: Sequence[Sequence[float]], config: TrainConfig) -> Finding:
    """Say whether the configured estimator will have something to learn from.

    Args:
        by_task: the rewards of each task's samples; those without a reward are left out.
    """
    estimator, success = config.algorithm.estimator, config.evaluation.success_reward
    size, count = config.rollouts.group_size, config.rollouts.batch_size
    given = [reward for rewards in by_task for reward in rewards]
    if not given:
        return Finding("no signal: no rollout has a reward", "return a number, or call emit_reward")
    if not compares_groups(config.algorithm) and len(set(given)) > 1:
        return Finding(f"{estimator} will have a signal: rewards differ")
    expected = fmean(unequal_share(rewards, size) for rewards in by_task)
    groups = (
        f"in about {expected * count:.0f} of {count} groups of {size} rollouts the rewards will "
        "differ"
    )
    if expected >= WEAK_BELOW:
        return Finding(f"{estimator} will have a signal: {groups}")
    if expected > 0:
        return Finding(f"{estimator} will have a weak signal: {groups}", MORE_SIGNAL)
    low, high = min(given), max(given)
    if low >= success:
        said = f"no signal: all {len(given)} rollouts succeeded"
        return Finding(said, "the base solves these tasks already; choose harder ones")
    same = f"all {len(given)} rollouts earned {low:g}"
    said = same if low == high else "all rollouts of a task earned the same"
    more = f"{MORE_SIGNAL}; --samples 64 finds rarer successes"
    return Finding(f"no signal: {said}", more)
