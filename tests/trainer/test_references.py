"""Every formula says where it is from."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from agentrl_trainer.data import advantages
from agentrl_trainer.data import batch_assembly as step
from agentrl_trainer.inference import sampling as pick
from agentrl_trainer.learner import losses, optimizers, prepare_batch
from agentrl_trainer.learner import value_head as values

FORMULAS: list[Callable[..., Any]] = [
    *(loss.formula for loss in losses.LOSSES.values()),
    losses.correction_weights,
    losses.kl_penalty,
    losses.token_sums,
    *(estimator.advantages for estimator in advantages.ESTIMATORS.values()),
    advantages.whiten_groups,
    advantages.discounted_returns,
    advantages.turn_advantages,
    advantages.state_advantages,
    advantages.token_advantages,
    values.value_loss,
    prepare_batch.with_gae,
    step.normalize_lengths,
    optimizers.schedule_factor,
    optimizers.default_learning_rate,
    optimizers.AdapterOptimizers.optim_step,
    pick._invert,
    pick._filtered_pick,
]


_YEAR = r"(?:19|20)\d\d\b"
REFERENCE = re.compile(
    r"arXiv:\d{4}\.\d{5}|doi:10\.\d{4,}/\S|https?://[\w-]+(?:\.[\w-]+)+/\S"
    # "Sutton and Barto 2018"; "Schulman et al., "LoRA Without Regret", 2025"
    rf"|[A-Z]\w+ (?:and [A-Z]\w+|et al\.),? (?:\"[^\"]+\", )?{_YEAR}"
    rf"|[A-Z]\w+ {_YEAR}, \"[^\"]+\""  # "Devroye 1986, "Non-Uniform Random Variate Generation""
)


@pytest.mark.parametrize("formula", dict.fromkeys(FORMULAS), ids=lambda f: f.__name__)
def test_a_formula_has_a_reference(formula: Callable[..., Any]) -> None:
    assert REFERENCE.search(" ".join((formula.__doc__ or "").split()))
