"""Success rates, their intervals, pass@k: against enumeration, scipy's values and coverage."""

from __future__ import annotations

import itertools
import random

import pytest

from agentrl.evaluate import score
from agentrl.intervals import mean_interval, pass_at_k, wilson
from agentrl_tracer.schemas import Reward, Rollout, RolloutState


@pytest.mark.parametrize("samples", [1, 2, 5])
def test_pass_at_k_is_the_share_of_draws_with_a_success(samples: int) -> None:
    for successes in range(samples + 1):
        outcomes = [True] * successes + [False] * (samples - successes)
        for k in range(1, samples + 1):
            draws = list(itertools.combinations(outcomes, k))
            expected = sum(any(draw) for draw in draws) / len(draws)
            assert pass_at_k(successes, samples, k) == pytest.approx(expected)
    with pytest.raises(ValueError, match="k must be in 1"):
        pass_at_k(0, samples, samples + 1)


def test_wilson_against_published_values() -> None:
    # Newcombe 1998, "Two-sided confidence intervals for the single proportion", table I, method 3.
    for successes, trials, low, high in (
        (81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ):  # fmt: skip
        assert wilson(successes, trials) == pytest.approx((low, high), abs=5e-5)
    with pytest.raises(ValueError, match="trials"):
        wilson(0, 0)


def test_the_interval_of_a_mean_covers_it() -> None:
    draw = random.Random(0)
    covered = 0
    for _ in range(400):
        low, high = mean_interval([draw.random() for _ in range(50)])
        covered += low <= 0.5 <= high
    assert 0.92 <= covered / 400 <= 0.98
    assert mean_interval([0.5]) == (0.5, 0.5)


def test_a_rollout_without_reward_is_no_success(make_rollouts: list[Rollout]) -> None:
    rewards = [
        Reward("a", rollout.id, "reward", value, key=rollout.id)
        for rollout, value in zip(make_rollouts[:3], (1.0, 0.5, 1.0), strict=True)
    ]
    found = score(make_rollouts, rewards, 1.0)
    # Task 0: success, no. Task 1: success, nothing emitted.
    assert (found.tasks, found.rollouts, found.successes, found.accuracy) == (2, 4, 2, 0.5)
    assert found.pass_at == {1: 0.5, 2: 1.0}
    assert found.reward == pytest.approx(2.5 / 3)


@pytest.fixture
def make_rollouts() -> list[Rollout]:
    from agentrl_tracer.schemas import Purpose

    fields = dict.fromkeys(Rollout.__dataclass_fields__)
    return [
        Rollout(
            **{
                **fields, "id": f"r{i}", "task_id": f"t{i // 2}", "winner": "a",
                "state": RolloutState.SUCCEEDED, "purpose": Purpose.EVAL,
            }
        )
        for i in range(4)
    ]  # fmt: skip
