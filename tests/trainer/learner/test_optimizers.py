"""Schedules of the learning rate, and its default."""

from __future__ import annotations

import math

import pytest
from small_learner import one_step
from small_models import training_row

from agentrl_trainer.learner.learner import Learner
from agentrl_trainer.learner.loss_options import AdamParams
from agentrl_trainer.learner.optimizers import Schedule, default_learning_rate, schedule_factor
from agentrl_trainer.models.loading import load_base


@pytest.mark.parametrize(
    ("schedule", "steps", "warmup", "expected"),
    [
        ("constant", 3, 0, [1, 1, 1]),
        ("linear", 4, 0, [1, 0.75, 0.5, 0.25]),
        ("cosine", 4, 0, [1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2]),
        ("constant", 5, 3, [0.25, 0.5, 0.75, 1, 1]),
        ("linear", 4, 2, [1 / 3, 2 / 3, 1, 0.5]),
        ("cosine", 2, 5, [1 / 6, 2 / 6]),  # never got warm
    ],
)
def test_shapes(schedule: Schedule, steps: int, warmup: int, expected: list[float]) -> None:
    found = [schedule_factor(schedule, step, steps, warmup) for step in range(1, steps + 1)]
    assert found == pytest.approx(expected)
    assert schedule_factor(schedule, steps + 5, steps, warmup) == (
        found[-1] if warmup < steps else pytest.approx(1.0)
    )


def test_steps_count_from_one() -> None:
    with pytest.raises(ValueError, match="from 1"):
        schedule_factor("linear", 0, 10)


def moved(rank: int, alpha: float) -> float:
    """How far one step of Adam moves the log-probs of a row under agentrl-tiny, summed."""
    base = load_base("agentrl-tiny", device="cpu")
    parameters = sum(p.numel() for p in base.model.parameters())
    adam = AdamParams(learning_rate=default_learning_rate(parameters, alpha))
    learner = Learner(base, rank=rank, alpha=alpha, adam=adam)
    datum = training_row(list(range(40, 72)))
    before = learner.forward([datum])[0]
    one_step(learner, [datum], "cross_entropy")
    return sum(learner.forward([datum])[0]) - sum(before)


@pytest.mark.parametrize(("rank", "alpha"), [(4, 32.0), (64, 32.0), (16, 8.0)])
def test_a_step_moves_the_model_alike_at_any_rank_and_alpha(rank: int, alpha: float) -> None:
    assert moved(rank, alpha) == pytest.approx(moved(32, 32.0), rel=0.1)
