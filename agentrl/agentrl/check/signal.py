"""Tell from the base model's rewards how often it succeeds, and whether that gives a signal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import fmean

from agentrl.config.checks import compares_groups
from agentrl.config.commands import TrainConfig
from agentrl.findings import MORE_SIGNAL, Finding, comparable
from agentrl.runs.statistics import pass_at_k, task_interval

WEAK_BELOW = 0.1
"""Of groups with unequal rewards: fewer make a step that learns from a tenth of its rollouts."""


def success_finding(by_task: Sequence[Sequence[float | None]], success: float) -> Finding:
    """Count the rollouts that succeed, of tasks with equally many samples."""
    won = [[reward is not None and reward >= success for reward in task] for task in by_task]
    count, rates = len(won[0]), [fmean(task) for task in won]
    low, high = task_interval(rates, count)
    return Finding(
        f"{fmean(rates):.0%} of {count * len(won)} rollouts of {len(won)} tasks earn at least "
        f"{success:g} (95 % interval {low:.0%} to {high:.0%}), pass@{count} "
        f"{fmean(map(any, won)):.0%}"
    )


def unequal_share(rewards: Sequence[float], size: int) -> float:
    """Estimate, without bias, the chance that a group of ``size`` rollouts has unequal rewards.

    With fewer rewards than ``size``: the chance in a group of so many, which is lower.
    """
    count = len(rewards)
    size = min(size, count)
    if size < 2:
        return 0.0
    # A group is equal to a value if it draws none of the others, as pass@k counts.
    return 1 - sum(1 - pass_at_k(count - n, count, size) for n in Counter(rewards).values())


def how_to_reward(config: TrainConfig) -> str:
    """Say what helps where rollouts have no reward."""
    if config.rewards:
        return "see what the functions of --rewards said of them"
    return "return a number (not True or False), or call emit_reward"


def signal_finding(
    by_task: Sequence[Sequence[float | None]], config: TrainConfig
) -> tuple[Finding, float]:
    """Say whether the estimator will have something to learn from; return the share of groups."""
    how, estimator = config.rollouts, config.algorithm.estimator
    known = [[comparable(reward) for reward in task if reward is not None] for task in by_task]
    given = [reward for task in known for reward in task]
    if not given:
        fix = how_to_reward(config)
        said = f"{estimator} will have no signal: no rollout has a reward"
        return Finding(said, fix, stops=True), 0.0
    if not compares_groups(config) and len(set(given)) > 1:
        return Finding(f"{estimator} will have a signal: rewards differ"), 1.0
    expected = fmean(unequal_share(task, how.group_size) for task in known)
    if expected > 0:
        weak = expected < WEAK_BELOW
        said = (
            f"{estimator} will have a {'weak ' * weak}signal: in about "
            f"{expected * how.batch_size:.0f} of {how.batch_size} groups of {how.group_size} "
            "rollouts the rewards will differ"
        )
        return Finding(said, MORE_SIGNAL if weak else ""), expected
    said, fix = f"all {len(given)} rollouts earned {given[0]:g}", MORE_SIGNAL
    if min(given) >= config.evaluation.success_reward:
        said, fix = f"all {len(given)} rollouts succeeded", "choose harder tasks"
    elif len(set(given)) > 1:
        said = "all rollouts of a task earned the same"
    return Finding(f"{estimator} will probably have no signal: {said}", fix), 0.0
