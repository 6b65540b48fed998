"""Data of the client's tests: one row of tokens, as datums and as a row of the learner."""

from __future__ import annotations

from typing import Any

from agentrl_trainer.client import AdamParams, Datum, ModelInput, TrainingClient
from agentrl_trainer.data.training_row import TrainingRow

TINY = "agentrl-tiny"
ROW = [5, 9, 300, 41, 77, 12, 600, 3]
SAMPLED = [0.0, 0.0, 0.0, -2.5, -7.0, -4.0, -9.0]
ADVANTAGES = [0.0, 0.0, 0.0, 1.0, 1.0, -0.5, 2.0]
RL_ROW = TrainingRow(
    tokens=ROW,
    mask=[False] * 4 + [True] * 4,
    logprobs=[0.0, *SAMPLED],
    advantages=[0.0, *ADVANTAGES],
    adapter="a",
)


def supervised(row: list[int] = ROW, **inputs: Any) -> Datum:
    return Datum(ModelInput.from_ints(row[:-1]), {"target_tokens": row[1:], **inputs})


def reinforced(**inputs: Any) -> Datum:
    return supervised(**{"logprobs": SAMPLED, "advantages": ADVANTAGES, **inputs})


def logprobs(client: TrainingClient) -> list[float]:
    """Of the targets of ``supervised()``."""
    return client.forward([supervised()]).result().loss_fn_outputs[0]["logprobs"].tolist()


def grad_norm(client: TrainingClient, learning_rate: float = 1e-2) -> float:
    """Of a step that is applied."""
    stepped = client.optim_step(AdamParams(learning_rate=learning_rate)).result()
    return stepped.metrics["grad_norm"]
