"""What an offline training learns: the only part in which its commands differ."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

import torch

from agentrl.config.commands import OfflineConfig, PreferConfig, RewardModelConfig
from agentrl.config.settings.offline import PreferenceSettings
from agentrl.datasets.samples import Example
from agentrl.training.setup.algorithm import REFERENCE
from agentrl_trainer.client import AdamParams, TrainingClient
from agentrl_trainer.data.training_row import TrainingRow
from agentrl_trainer.learner.learner import Learner
from agentrl_trainer.learner.losses import CustomLoss
from agentrl_trainer.learner.preference_losses import (
    DEFAULT_BETA,
    WITH_REFERENCE,
    mismatched,
    pair_loss,
    reference_sum,
)
from agentrl_trainer.learner.reward_head import pair_scores_loss, regression_loss, score_row

RowsAndLoss = tuple[list[TrainingRow], CustomLoss[TrainingRow]]


def objective_of(config: OfflineConfig) -> Objective:
    if isinstance(config, PreferConfig):
        return Prefer(config.preference)
    return RewardModel() if isinstance(config, RewardModelConfig) else Sft()


class Objective(ABC):
    """How examples become updates. It keeps no state: a resumed run makes a new one."""

    name: str
    """Of the command and the kind of the run."""

    @abstractmethod
    def update(
        self, client: TrainingClient, examples: Sequence[Example], adam: AdamParams
    ) -> dict[str, float]:
        """Make one optimizer step; return its metrics, of which ``loss`` is one."""

    @abstractmethod
    def measure(self, client: TrainingClient, examples: Sequence[Example]) -> dict[str, float]:
        """Measure held-out examples without a gradient; ``loss`` is one of the metrics."""


class JudgedObjective(Objective):
    """Learns from pairs or scores, by a loss of whole answers."""

    @abstractmethod
    def rows_and_loss(self, client: TrainingClient, examples: Sequence[Example]) -> RowsAndLoss:
        """Return the rows of examples, and the loss of their log-probs or scores."""

    def update(
        self, client: TrainingClient, examples: Sequence[Example], adam: AdamParams
    ) -> dict[str, float]:
        added = client.forward_backward_custom(*self.rows_and_loss(client, examples))
        stepped = client.optim_step(adam).result().metrics
        found = added.result().metrics
        rewards = {name: value for name, value in found.items() if name.startswith("rewards/")}
        return {"loss": found["loss:sum"], **rewards, **stepped}

    def measure(self, client: TrainingClient, examples: Sequence[Example]) -> dict[str, float]:
        rows, loss = self.rows_and_loss(client, examples)
        outputs = client.forward(rows, "cross_entropy").result().loss_fn_outputs
        value, metrics = loss(rows, [torch.from_numpy(one["logprobs"]) for one in outputs])
        return {"loss": value.item(), **metrics}


class Sft(Objective):
    """The cross-entropy of weighted tokens: the ``advantages`` of rows are their weights."""

    name = "sft"

    def update(
        self, client: TrainingClient, examples: Sequence[Example], adam: AdamParams
    ) -> dict[str, float]:
        rows = _rows(examples)
        added = client.forward_backward(
            rows, "cross_entropy", normalize_by=_weight(rows), logprobs=False
        )
        stepped = client.optim_step(adam).result().metrics
        found = added.result().metrics
        return {
            "loss": found["loss:sum"],
            "tokens/trained": found["tokens:sum"],
            "tokens/total": float(sum(len(row.tokens) for row in rows)),
            **stepped,
        }

    def measure(self, client: TrainingClient, examples: Sequence[Example]) -> dict[str, float]:
        rows = _rows(examples)
        found = client.forward(rows, "cross_entropy").result().metrics
        return {"loss": found["loss:sum"] / _weight(rows)}


class Prefer(JudgedObjective):
    """Learns pairs. The reference is the adapter ``REFERENCE``, else the base model."""

    name = "prefer"

    def __init__(self, settings: PreferenceSettings) -> None:
        self._loss = settings.loss
        self._beta = settings.beta or DEFAULT_BETA[settings.loss]
        self._gamma = 1.0 if settings.gamma is None else settings.gamma

    def rows_and_loss(self, client: TrainingClient, examples: Sequence[Example]) -> RowsAndLoss:
        rows = [replace(row, adapter=client.model_id) for row in _rows(examples)]
        if self._loss in WITH_REFERENCE:
            rows = _with_reference(client, rows)
        kl = 0.0
        if self._loss == "kto" and len(rows) > 2:  # a single pair has no answer to another prompt
            others = _with_reference(client, mismatched(rows))
            found = client.forward(others, "cross_entropy").result().loss_fn_outputs
            both = zip(found, others, strict=True)
            ratios = [float(one["logprobs"].sum()) - reference_sum(row) for one, row in both]
            kl = max(0.0, sum(ratios) / len(ratios))
        return rows, pair_loss(self._loss, self._beta, gamma=self._gamma, kl=kl)


class RewardModel(JudgedObjective):
    """Learns scores from pairs (Bradley-Terry) or from scored rows (regression)."""

    name = "reward-model"

    def rows_and_loss(self, client: TrainingClient, examples: Sequence[Example]) -> RowsAndLoss:
        rows = [score_row(row.tokens) for row in _rows(examples)]
        if len(rows) > len(examples):
            return rows, pair_scores_loss
        return rows, regression_loss([one.score for one in examples])


def _rows(examples: Sequence[Example]) -> list[TrainingRow]:
    return [row for one in examples for row in one.rows]


def _weight(rows: Sequence[TrainingRow]) -> float:
    """Sum the weights of the tokens that train."""
    return sum(sum(row.advantages) for row in rows)


def _with_reference(client: TrainingClient, rows: list[TrainingRow]) -> list[TrainingRow]:
    def work(learner: Learner) -> list[TrainingRow]:
        known = REFERENCE in learner.model.peft_config
        return learner.with_reference(rows, REFERENCE if known else None)

    return client.local(work).result()
