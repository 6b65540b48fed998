"""Reward models: a LoRA and a head that give a number to a conversation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from agentrl.config.commands import RewardModelConfig
from agentrl.console.output import print_line
from agentrl.datasets.preferences import RowPair, ScoredRow, file_scores, run_scores
from agentrl.offline.command import Prepared
from agentrl.offline.examples import train_and_held_out
from agentrl.offline.prefer import read_pairs
from agentrl_proxy.rendering.renderer import Renderer
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
        train, held_out = _read_scores(config, facts)
        return Prepared(RewardModel(), train, held_out, scores=True)
    pairs, others = read_pairs(config, facts)
    return Prepared(RewardModel(), pairs, others, scores=True)


def _read_scores(
    config: RewardModelConfig, facts: ModelFacts
) -> tuple[list[ScoredRow], list[ScoredRow]]:
    data, renderer = config.data, Renderer(facts.tokenizer)
    longest = min(config.learning.max_length or facts.context_length, facts.context_length)
    if data.from_run is not None:
        found = run_scores(data.from_run, config.model.name, data.where, data.by)
    else:
        found = file_scores(data.source or "", "data.source", renderer)
    train, held_out = train_and_held_out(
        found, data.held_out, longest, config.run.seed,
        lambda source: file_scores(source, "data.held_out", renderer),
    )  # fmt: skip
    print_line((f"train on {len(train):,} scored answers", "dim"))
    if held_out:
        print_line((f"hold out {len(held_out):,} scored answers", "dim"))
    return train, held_out
