"""Reward models: a LoRA and a head that give a number to a conversation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from agentrl.config.commands import RewardModelConfig
from agentrl.datasets.preferences import (
    RowPair,
    ScoredRow,
    file_pairs,
    file_scores,
    run_pairs,
    run_scores,
)
from agentrl.offline.command import Prepared
from agentrl.offline.examples import read_judged
from agentrl_trainer.client import AdamParams, TrainingClient
from agentrl_trainer.data.training_row import TrainingRow
from agentrl_trainer.learner.losses import CustomLoss
from agentrl_trainer.learner.reward_head import pair_scores_loss, regression_loss, score_row
from agentrl_trainer.models.loading import ModelFacts

Rated = RowPair | ScoredRow


class RewardModel:
    """Learns from pairs (Bradley-Terry) or from scored rows (regression)."""

    name = "reward-model"

    def update(
        self, client: TrainingClient, examples: Sequence[Rated], adam: AdamParams
    ) -> dict[str, float]:
        rows, loss = _rows_and_loss(examples)
        added = client.forward_backward_custom(rows, loss)
        stepped = client.optim_step(adam).result().metrics
        found = added.result().metrics
        rewards = {name: value for name, value in found.items() if name.startswith("rewards/")}
        return {"loss": found["loss:sum"], **rewards, **stepped}

    def measure(self, client: TrainingClient, examples: Sequence[Rated]) -> dict[str, float]:
        rows, loss = _rows_and_loss(examples)
        outputs = client.forward(rows, "cross_entropy").result().loss_fn_outputs
        scores: list[Tensor] = [torch.from_numpy(one["logprobs"]) for one in outputs]
        value, metrics = loss(rows, scores)
        return {"loss": value.item(), **metrics}


def _rows_and_loss(
    examples: Sequence[Rated],
) -> tuple[list[TrainingRow], CustomLoss[TrainingRow]]:
    """Return the rows to score, and their loss."""
    scored = [one for one in examples if isinstance(one, ScoredRow)]
    if scored:
        rows = [score_row(one.row.tokens) for one in scored]
        return rows, regression_loss([one.score for one in scored])
    pairs = [one for one in examples if isinstance(one, RowPair)]
    both = [row for pair in pairs for row in (pair.chosen, pair.rejected)]
    return [score_row(row.tokens) for row in both], pair_scores_loss


def prepare(config: RewardModelConfig, facts: ModelFacts) -> Prepared[Rated]:
    """Read the examples and the held-out ones; say how many there are, and what is left out.

    Raises:
        ConfigError: an example cannot be read, or none is left.
    """
    if config.reward_model.loss == "regression":
        scored = read_judged(config, facts, run_scores, file_scores, "scored answers")
        return Prepared(RewardModel(), *scored, scores=True)
    pairs = read_judged(config, facts, run_pairs, file_pairs, "pairs")
    return Prepared(RewardModel(), *pairs, scores=True)
