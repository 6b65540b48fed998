"""Success rates, their intervals, pass@k: against enumeration, published values and coverage."""

from __future__ import annotations

import io
import itertools

import numpy as np
import pytest
from call_records import reward, rollout
from rich.console import Console

from agentrl.cli.eval import evaluation_report, score
from agentrl.training.evaluation import pass_at_k, task_interval, wilson
from agentrl_tracer.schemas import Reward, Rollout


@pytest.mark.parametrize("samples", [1, 2, 5])
def test_pass_at_k_is_the_share_of_draws_with_a_success(samples: int) -> None:
    for successes in range(samples + 1):
        outcomes = [True] * successes + [False] * (samples - successes)
        for k in range(1, samples + 1):
            draws = list(itertools.combinations(outcomes, k))
            expected = sum(any(draw) for draw in draws) / len(draws)
            assert pass_at_k(successes, samples, k) == pytest.approx(expected)


def test_wilson_against_published_values() -> None:
    # Newcombe 1998, "Two-sided confidence intervals for the single proportion", table I, method 3.
    for successes, trials, low, high in (
        (81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ):  # fmt: skip
        assert wilson(successes / trials, trials) == pytest.approx((low, high), abs=5e-5)
    for rate, tenths in itertools.product((0.0, 1.0), range(1, 2000)):  # whatever is rounded
        low, high = wilson(rate, tenths / 10)
        assert 0 <= low <= rate <= high <= 1


def reference(values: list[float], samples: int) -> tuple[float, float]:
    """Slow and obvious: the rates p which |mean - p| <= z sqrt(p (1 - p) / trials) allows."""
    smoothed = np.array([*values, 0.0, 1.0])
    of_one_trial = smoothed.mean() * (1 - smoothed.mean())
    trials = len(values) * min(of_one_trial / np.var(smoothed), samples)
    rates = np.linspace(0, 1, 2_000_001)
    allowed = np.abs(np.mean(values) - rates) <= 1.959963985 * np.sqrt(rates * (1 - rates) / trials)
    return float(rates[allowed].min()), float(rates[allowed].max())


@pytest.mark.parametrize(
    ("values", "samples"),
    [
        ([1.0] * 24, 2),
        ([0.0] * 7, 8),
        ([1.0] * 23 + [0.5], 2),
        ([0.25, 0.5, 0.75, 1.0, 0.0, 0.5], 4),
        ([0.5], 2),
        ([1.0, 0.0, 1.0], 1),
    ],
)
def test_the_interval_over_tasks(values: list[float], samples: int) -> None:
    assert task_interval(values, samples) == pytest.approx(reference(values, samples), abs=1e-6)


def test_samples_that_agree_are_no_more_than_tasks() -> None:
    assert task_interval([1.0] * 24, 2) == pytest.approx((0.862, 1.0), abs=5e-4)
    assert task_interval([1.0] * 24, 64) == task_interval([1.0] * 24, 1) == wilson(1, 24)
    binary = [1.0] * 9 + [0.0] * 4
    assert task_interval(binary, 8) == pytest.approx(wilson(9 / 13, 13))


@pytest.mark.parametrize("shape", [(2.0, 2.0), (30.0, 1.0), (0.3, 3.0)])
@pytest.mark.parametrize(("tasks", "samples", "k"), [(10, 4, 1), (24, 8, 4), (60, 4, 2)])
def test_it_covers_what_it_should(
    shape: tuple[float, float], tasks: int, samples: int, k: int
) -> None:
    """Evaluations of agents whose tasks differ: how often the true pass@k is in the interval."""
    draw = np.random.default_rng(0)
    true = float((1 - (1 - draw.beta(*shape, 400_000)) ** k).mean())
    covered = 0
    for _ in range(600):
        right = draw.binomial(samples, draw.beta(*shape, tasks))
        values = [pass_at_k(int(count), samples, k) for count in right]
        low, high = task_interval(values, samples)
        covered += low <= true <= high
    assert covered / 600 >= 0.93  # 0.95 less two standard errors of 600 evaluations


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
