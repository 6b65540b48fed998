"""Intervals and pass@k: against enumeration, published values and coverage."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from agentrl.runs.statistics import paired_p_value, pass_at_k, task_interval, wilson


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
        ([1.0] * 9 + [0.0] * 4, 8),
    ],
)
def test_the_interval_over_tasks(values: list[float], samples: int) -> None:
    assert task_interval(values, samples) == pytest.approx(reference(values, samples), abs=1e-6)


def test_samples_that_agree_are_no_more_than_tasks() -> None:
    assert task_interval([1.0] * 24, 64) == task_interval([1.0] * 24, 1) == wilson(1, 24)


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


@pytest.mark.parametrize("differences", [[1, 1, -1, 1], [3, -1, 2, 0, 2], [1] * 9, [2, -2], [0]])
def test_the_paired_test_is_the_share_of_sign_flips_that_are_as_extreme(
    differences: list[int],
) -> None:
    sums = [
        sum(sign * one for sign, one in zip(signs, differences, strict=True))
        for signs in itertools.product((-1, 1), repeat=len(differences))
    ]
    expected = np.mean([abs(total) >= abs(sum(differences)) for total in sums])
    assert paired_p_value(differences) == pytest.approx(expected)
    assert paired_p_value([8] * 5000 + [-3] * 5000) < 1e-9


def test_with_one_sample_a_task_the_paired_test_is_exact_mcnemar() -> None:
    for gained, lost in ((9, 1), (0, 6), (40, 25), (3, 3)):
        flipped = gained + lost  # of these, as many or more one way, and as many the other
        tail = sum(math.comb(flipped, n) for n in range(max(gained, lost), flipped + 1))
        expected = pytest.approx(min(1.0, 2 * tail / 2**flipped))
        assert paired_p_value([1] * gained + [-1] * lost + [0] * 50) == expected
