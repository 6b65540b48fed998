"""Success rates, their intervals, pass@k: against enumeration, published values and coverage."""

from __future__ import annotations

import io

import pytest
from call_records import reward, rollout
from rich.console import Console

from agentrl.cli.eval import evaluation_report, score
from agentrl_tracer.schemas import Reward, Rollout


def rollouts(count: int) -> list[Rollout]:
    """Two of each task."""
    return [rollout(f"r{i}", task=f"t{i // 2}") for i in range(count)]


def rewards(*values: float) -> list[Reward]:
    return [reward(f"r{i}", value) for i, value in enumerate(values)]


def test_an_evaluation_that_is_all_right_is_not_certain() -> None:
    found = score(rollouts(48), rewards(*[1.0] * 48), 1.0)
    assert (found.accuracy, found.pass_at) == (1.0, {1: 1.0, 2: 1.0})
    assert found.interval == pytest.approx((0.862, 1.0), abs=5e-4)
    assert found.pass_at_interval == {1: found.interval, 2: found.interval}
    console = Console(record=True, width=120, file=io.StringIO())
    console.print(evaluation_report(found, {}))
    assert console.export_text().count("95 % interval 86.2% to 100.0%") == 3


def test_a_rollout_without_reward_is_no_success() -> None:
    found = score(rollouts(4), rewards(1.0, 0.5, 1.0), 1.0)
    # Task 0: success, no. Task 1: success, nothing emitted.
    assert (found.tasks, found.rollouts, found.successes, found.accuracy) == (2, 4, 2, 0.5)
    assert found.pass_at == {1: 0.5, 2: 1.0}
    assert found.reward == pytest.approx(2.5 / 3)
