"""Supervised fine-tuning: the cross-entropy of the weighted tokens."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl_trainer.client import AdamParams, TrainingClient
from agentrl_trainer.data.training_row import TrainingRow


class Sft:
    """Learns token rows, whose ``advantages`` are the weights of their tokens."""

    name = "sft"

    def update(
        self, client: TrainingClient, examples: Sequence[TrainingRow], adam: AdamParams
    ) -> dict[str, float]:
        weight = _weight(examples)
        added = client.forward_backward(
            list(examples), "cross_entropy", normalize_by=weight, logprobs=False
        )
        stepped = client.optim_step(adam).result().metrics
        done = added.result()
        return {
            "loss": done.metrics["loss:sum"],
            "tokens/trained": done.metrics["tokens:sum"],
            "tokens/total": float(sum(len(row.tokens) for row in examples)),
            **{name: value for name, value in stepped.items() if value is not None},
        }

    def measure(self, client: TrainingClient, examples: Sequence[TrainingRow]) -> dict[str, float]:
        found = client.forward(list(examples), "cross_entropy").result().metrics
        loss = found["loss:sum"] / _weight(examples)
        return {"loss": loss}


def _weight(rows: Sequence[TrainingRow]) -> float:
    """Sum the weights of the tokens that train."""
    return sum(
        weight
        for row in rows
        for weight, on in zip(row.advantages, row.mask, strict=True)
        if on
    )


def prepare(config: SftConfig, facts: ModelFacts) -> Prepared[TrainingRow]:
    raise NotImplementedError
