"""Every formula says where it is from."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from agentrl_trainer import advantages, learner, losses, schedules, step, values
from agentrl_trainer.sampler import pick

FORMULAS: list[Callable[..., Any]] = [
    *(loss.formula for loss in losses.LOSSES.values()),
    losses.correction_weights,
    losses.kl_penalty,
    losses.token_sums,
    *(estimator.advantages for estimator in advantages.ESTIMATORS.values()),
    advantages.whiten_groups,
    advantages.discounted_returns,
    advantages.turn_advantages,
    advantages.anchor_advantages,
    advantages.token_advantages,
    values.value_loss,
    values.with_gae,
    step.normalize_lengths,
    schedules.schedule_factor,
    schedules.default_learning_rate,
    learner.Learner.optim_step,
    pick._invert,
    pick._filtered_pick,
]


@pytest.mark.parametrize("formula", dict.fromkeys(FORMULAS), ids=lambda f: f.__name__)
def test_a_formula_has_a_reference(formula: Callable[..., Any]) -> None:
    text = formula.__doc__ or ""
    assert re.search(r"arXiv:\d{4}\.\d{5}|doi:10\.|https?://|\b(19|20)\d\d\b|equation \d", text)
