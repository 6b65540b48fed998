from __future__ import annotations

import math

import pytest

from agentrl_trainer.learner.schedules import Schedule, schedule_factor


def curve(schedule: Schedule, steps: int, warmup: int = 0) -> list[float]:
    return [schedule_factor(schedule, step, steps, warmup) for step in range(1, steps + 1)]


def test_shapes() -> None:
    assert curve("constant", 3) == [1, 1, 1]
    assert curve("linear", 4) == [1, 0.75, 0.5, 0.25]
    assert curve("cosine", 2) == pytest.approx([1, 0.5])
    assert curve("cosine", 4)[1] == pytest.approx((1 + math.cos(math.pi / 4)) / 2)


def test_warm_up() -> None:
    assert curve("constant", 5, 3) == [0.25, 0.5, 0.75, 1, 1]
    assert curve("linear", 4, 2) == pytest.approx([1 / 3, 2 / 3, 1, 0.5])
    assert curve("cosine", 2, 5) == pytest.approx([1 / 6, 2 / 6])  # never got warm


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_never_zero_nor_above_the_peak(schedule: Schedule) -> None:
    for warmup in (0, 1, 9, 20):
        assert all(0 < factor <= 1 for factor in curve(schedule, 10, warmup))
    assert schedule_factor(schedule, 15, 10) == schedule_factor(schedule, 10, 10)


def test_steps_count_from_one() -> None:
    with pytest.raises(ValueError, match="from 1"):
        schedule_factor("linear", 0, 10)
