"""The default learning rate suits any rank and alpha."""

from __future__ import annotations

import pytest

from agentrl_trainer.data.training_row import TrainingRow
from agentrl_trainer.learner.learner import Learner
from agentrl_trainer.learner.loss_options import AdamParams
from agentrl_trainer.learner.schedules import default_learning_rate
from agentrl_trainer.models.loading import load_base


def moved(rank: int, alpha: float) -> float:
    """How far one step of Adam moves the log-probs of a row under agentrl-tiny, summed."""
    base = load_base("agentrl-tiny", device="cpu")
    parameters = sum(p.numel() for p in base.model.parameters())
    adam = AdamParams(learning_rate=default_learning_rate(parameters, alpha))
    learner = Learner(base, rank=rank, alpha=alpha, adam=adam)
    datum = TrainingRow(list(range(40, 72)), [False] + [True] * 31, [0.0] * 32, [1.0] * 32)
    before = learner.forward([datum])[0]
    learner.step([datum], "cross_entropy")
    return sum(learner.forward([datum])[0]) - sum(before)


@pytest.mark.parametrize(("rank", "alpha"), [(4, 32.0), (64, 32.0), (16, 8.0)])
def test_a_step_moves_the_model_alike_at_any_rank_and_alpha(rank: int, alpha: float) -> None:
    assert moved(rank, alpha) == pytest.approx(moved(32, 32.0), rel=0.1)
