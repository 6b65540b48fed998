"""The expected share of groups that teach, and the verdict on a training."""

from __future__ import annotations

import itertools
from fractions import Fraction
from typing import Any

import pytest

from agentrl.check.signal import unequal_share, verdict
from agentrl.config.commands import TrainConfig


@pytest.mark.parametrize("rewards", [[0, 0, 0, 1, 1], [0, 0.5, 1, 1, 1], [2] * 5])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_the_share_is_that_of_all_groups_that_could_be_drawn(
    rewards: list[float], size: int
) -> None:
    groups = [*itertools.combinations(rewards, size)]
    expected = Fraction(sum(len(set(group)) > 1 for group in groups), len(groups))
    assert unequal_share(rewards, size) == pytest.approx(float(expected))


def test_larger_groups_than_samples_are_drawn_with_replacement() -> None:
    assert unequal_share([0, 1], 4) == pytest.approx(1 - 2 / 16)
    assert unequal_share([1], 4) == 0.0


@pytest.mark.parametrize(
    ("by_task", "changes", "fact", "fix"),
    [
        ([[0, 1, 0, 1]] * 2, {}, "in about 16 of 16 groups of 4 rollouts the rewards will differ",
         ""),
        ([[0] * 63 + [1]] + [[0] * 64] * 2, {}, "weak signal: in about 0 of 16", "easier tasks"),
        ([[0] * 8] * 4, {}, "no signal: all 32 rollouts earned 0", "recipes/sft.py"),
        ([[1] * 8] * 4, {}, "no signal: all 32 rollouts succeeded", "harder"),
        ([[0] * 8, [1] * 8], {}, "no signal: all rollouts of a task earned the same", "easier"),
        ([[], []], {}, "no signal: no rollout has a reward", "emit_reward"),
        ([[0] * 8, [1] * 8], {"algorithm": {"estimator": "reinforce"}},
         "reinforce will have a signal", ""),
    ],
)  # fmt: skip
def test_the_verdict(
    by_task: list[list[float]], changes: dict[str, Any], fact: str, fix: str
) -> None:
    agent = {"entrypoint": "a:b", "tasks": "t"}
    found = verdict(by_task, TrainConfig.model_validate({"agent": agent} | changes))
    assert fact in found.fact
    assert fix in found.fix
    assert bool(fix) == bool(found.fix)
