"""The expected share of groups that teach, and the verdict on a training."""

from __future__ import annotations

import itertools
from fractions import Fraction
from typing import Any

import pytest

from agentrl.check.signal import signal_finding, success_finding, unequal_share
from agentrl.config.commands import TrainConfig


@pytest.mark.parametrize("rewards", [[0, 0, 0, 1, 1], [0, 0.5, 1, 1, 1], [2] * 5])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_the_share_is_that_of_all_groups_that_could_be_drawn(
    rewards: list[float], size: int
) -> None:
    groups = [*itertools.combinations(rewards, size)]
    expected = Fraction(sum(len(set(group)) > 1 for group in groups), len(groups))
    assert unequal_share(rewards, size) == pytest.approx(float(expected))


def test_fewer_samples_than_a_group_has_tell_of_a_smaller_group() -> None:
    assert unequal_share([0, 0, 1], 4) == unequal_share([0, 0, 1], 3) == 1.0
    assert unequal_share([1, 1], 4) == unequal_share([1], 4) == unequal_share([], 4) == 0.0


def test_the_success_has_an_interval_over_tasks() -> None:
    assert success_finding([[1, 0.5, None, 1], [0] * 4], 1.0).fact == (
        "25% of 8 rollouts of 2 tasks earn at least 1 (95 % interval 3% to 76%), pass@4 50%"
    )


@pytest.mark.parametrize(
    ("by_task", "changes", "fact", "fix"),
    [
        ([[0, 1, 0, 1]] * 2, {}, "in about 16 of 16 groups of 4 rollouts the rewards will differ",
         ""),
        ([[0] * 63 + [1]] + [[0] * 64] * 2, {}, "weak signal: in about 0 of 16", "easier tasks"),
        ([[0] * 8] * 4, {}, "no signal: all 32 rollouts earned 0", "agentrl sft"),
        ([[1] * 8] * 4, {}, "no signal: all 32 rollouts succeeded", "harder"),
        ([[0] * 8, [1] * 8], {}, "no signal: all rollouts of a task earned the same", "easier"),
        ([[0.1 + 0.2, 0.3] * 4] * 2, {}, "no signal: all 16 rollouts earned 0.3", "easier"),
        ([[None], [None]], {}, "no signal: no rollout has a reward", "emit_reward"),
        ([[0] * 8, [1] * 8], {"algorithm": {"estimator": "reinforce"}},
         "reinforce will have a signal", ""),
    ],
)  # fmt: skip
def test_the_verdict(
    by_task: list[list[float | None]], changes: dict[str, Any], fact: str, fix: str
) -> None:
    agent = {"entrypoint": "a:b", "tasks": "t"}
    found, share = signal_finding(by_task, TrainConfig.model_validate({"agent": agent} | changes))
    assert fact in found.fact
    assert fix in found.fix
    assert bool(fix) == bool(found.fix)
    assert found.stops == ("no rollout has a reward" in fact)
    assert (share == 0.0) == ("no signal" in fact)
