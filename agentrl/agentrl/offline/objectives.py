"""What an offline training learns: the only part in which its commands differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from agentrl.config.commands import OfflineConfig, PreferConfig, RewardModelConfig, SftConfig
from agentrl.datasets.samples import Example
from agentrl.training.setup.algorithm import REFERENCE
from agentrl_trainer.client import AdamParams, TrainingClient
from agentrl_trainer.data.training_row import TrainingRow
from agentrl_trainer.learner.losses import CustomLoss
from agentrl_trainer.learner.preference_losses import (
    WITH_REFERENCE,
    mismatched,
    pair_loss,
    reference_sum,
)
from agentrl_trainer.learner.reward_head import pair_scores_loss, regression_loss, score_row

RowsAndLoss = tuple[list[TrainingRow], CustomLoss[TrainingRow]]


def update(
    config: OfflineConfig, client: TrainingClient, examples: Sequence[Example], adam: AdamParams
) -> dict[str, float]:
    """Make one optimizer step; return its metrics, of which ``loss`` is one."""
    if isinstance(config, SftConfig):
        rows = _rows(examples)
        added = client.forward_backward(
            rows, "cross_entropy", normalize_by=_weight(rows), logprobs=False
        )
    else:
        rows, loss = _rows_and_loss(config, client, examples)
        added = client.forward_backward_custom(rows, loss)
    stepped = client.optim_step(adam).result().metrics
    found = added.result().metrics
    rewards = {name: value for name, value in found.items() if name.startswith("rewards/")}
    tokens = {
        "tokens/trained": float(sum(row.trained for row in rows)),
        "tokens/total": float(sum(len(row.tokens) for row in rows)),
    }
    return {"loss": found["loss:sum"], **rewards, **tokens, **stepped}


def measure(
    config: OfflineConfig, client: TrainingClient, examples: Sequence[Example]
) -> dict[str, float]:
    """Measure held-out examples without a gradient; ``loss`` is one of the metrics."""
    if isinstance(config, SftConfig):
        rows = _rows(examples)
        found = client.forward(rows, "cross_entropy").result().metrics
        return {"loss": found["loss:sum"] / _weight(rows)}
    rows, loss = _rows_and_loss(config, client, examples)
    outputs = client.forward(rows, "cross_entropy").result().loss_fn_outputs
    value, metrics = loss(rows, [torch.from_numpy(one["logprobs"]) for one in outputs])
    return {"loss": value.item(), **metrics}


def _rows_and_loss(
    config: OfflineConfig, client: TrainingClient, examples: Sequence[Example]
) -> RowsAndLoss:
    """Return the rows of pairs or scored answers, and the loss of their log-probs or scores."""
    if isinstance(config, PreferConfig):
        return _preferred(config, client, examples)
    assert isinstance(config, RewardModelConfig)
    rows = [score_row(row.tokens) for row in _rows(examples)]
    if config.reward_model.loss == "regression":
        return rows, regression_loss([one.score for one in examples])
    return rows, pair_scores_loss


def _preferred(
    config: PreferConfig, client: TrainingClient, examples: Sequence[Example]
) -> RowsAndLoss:
    """The reference is what the adapter started from, else the base model."""
    reference = REFERENCE if config.learning.init_adapter else None

    def with_reference(rows: list[TrainingRow]) -> list[TrainingRow]:
        return client.local(lambda learner: learner.with_reference(rows, reference)).result()

    how, kl = config.preference, 0.0
    rows = [replace(row, adapter=client.model_id) for row in _rows(examples)]
    if how.loss in WITH_REFERENCE:
        rows = with_reference(rows)
    if how.loss == "kto" and len(rows) > 2:  # a single pair has no answer to another prompt
        others = with_reference(mismatched(rows))
        found = client.forward(others, "cross_entropy").result().loss_fn_outputs
        both = zip(found, others, strict=True)
        ratios = [float(one["logprobs"].sum()) - reference_sum(row) for one, row in both]
        kl = max(0.0, sum(ratios) / len(ratios))
    beta = how.beta or (2.0 if how.loss == "simpo" else 0.1)
    return rows, pair_loss(how.loss, beta, gamma=how.gamma, kl=kl)


def _rows(examples: Sequence[Example]) -> list[TrainingRow]:
    return [row for one in examples for row in one.rows]


def _weight(rows: Sequence[TrainingRow]) -> float:
    """Sum the weights of the tokens that train."""
    return sum(sum(row.advantages) for row in rows)
