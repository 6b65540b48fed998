"""Preference optimization: the policy itself learns which of two answers is better."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from agentrl.config.commands import PreferConfig
from agentrl.config.settings.offline import PreferenceSettings
from agentrl.datasets.preferences import RowPair, file_pairs, run_pairs
from agentrl.offline.command import Prepared
from agentrl.offline.examples import read_judged
from agentrl.training.setup.algorithm import REFERENCE
from agentrl_trainer.client import AdamParams, TrainingClient
from agentrl_trainer.data.training_row import TrainingRow
from agentrl_trainer.learner.learner import Learner
from agentrl_trainer.learner.losses import CustomLoss
from agentrl_trainer.learner.preference_losses import (
    DEFAULT_BETA,
    WITH_REFERENCE,
    PreferenceOptions,
    mismatched,
    pair_loss,
    reference_sum,
)
from agentrl_trainer.models.loading import ModelFacts


class Prefer:
    """Learns pairs of rows. The reference is the adapter ``REFERENCE``, else the base model."""

    name = "prefer"

    def __init__(self, settings: PreferenceSettings) -> None:
        beta = settings.beta or DEFAULT_BETA[settings.loss]
        gamma = 1.0 if settings.gamma is None else settings.gamma
        self._loss, self._options = settings.loss, PreferenceOptions(beta, gamma)

    def update(
        self, client: TrainingClient, examples: Sequence[RowPair], adam: AdamParams
    ) -> dict[str, float]:
        rows = self._rows(client, examples)
        added = client.forward_backward_custom(rows, self._pair_loss(client, rows))
        stepped = client.optim_step(adam).result().metrics
        found = added.result().metrics
        rewards = {name: value for name, value in found.items() if name.startswith("rewards/")}
        return {"loss": found["loss:sum"], **rewards, **stepped}

    def measure(self, client: TrainingClient, examples: Sequence[RowPair]) -> dict[str, float]:
        rows = self._rows(client, examples)
        loss = self._pair_loss(client, rows)
        outputs = client.forward(rows, "cross_entropy").result().loss_fn_outputs
        value, metrics = loss(rows, [torch.from_numpy(one["logprobs"]) for one in outputs])
        return {"loss": value.item(), **metrics}

    def _rows(self, client: TrainingClient, examples: Sequence[RowPair]) -> list[TrainingRow]:
        """Return chosen and rejected rows in turn, with the reference's log-probs if needed."""
        rows = [row for pair in examples for row in (pair.chosen, pair.rejected)]
        return self._with_reference(client, rows)

    def _with_reference(
        self, client: TrainingClient, rows: Sequence[TrainingRow]
    ) -> list[TrainingRow]:
        own = [replace(row, adapter=client.model_id) for row in rows]
        if self._loss not in WITH_REFERENCE:
            return own

        def work(learner: Learner) -> list[TrainingRow]:
            known = REFERENCE in learner.model.peft_config
            return learner.with_reference(own, REFERENCE if known else None)

        return client.local(work).result()

    def _pair_loss(
        self, client: TrainingClient, rows: Sequence[TrainingRow]
    ) -> CustomLoss[TrainingRow]:
        options = self._options
        if self._loss == "kto" and len(rows) > 2:  # a single pair has no answer to another prompt
            options = replace(options, kl=self._kl(client, rows))
        return pair_loss(self._loss, options)

    def _kl(self, client: TrainingClient, rows: Sequence[TrainingRow]) -> float:
        """Estimate KL(policy || reference) as KTO does."""
        others = self._with_reference(client, mismatched(rows))
        found = client.forward(others, "cross_entropy").result().loss_fn_outputs
        ratios = [
            float(one["logprobs"].sum()) - reference_sum(row)
            for one, row in zip(found, others, strict=True)
        ]
        return max(0.0, sum(ratios) / len(ratios))


def prepare(config: PreferConfig, facts: ModelFacts) -> Prepared[RowPair]:
    """Read the pairs and the held-out ones; say how many there are, and what is left out.

    Raises:
        ConfigError: a pair cannot be read, or none is left.
    """
    examples = read_judged(config, facts, run_pairs, file_pairs, "pairs")
    return Prepared(Prefer(config.preference), *examples, refers=True)
