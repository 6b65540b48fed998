"""Runs in the cookbook's own virtual environment: its functions on given numbers, a JSON line each.

No model and no server: where the cookbook asks a sampling client for log-probs, it gets the ones of
the case. Everything else is the cookbook's code.
"""

from __future__ import annotations

import asyncio
from typing import get_args

import tinker
import torch
from peer import answer_questions
from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.distillation import train_on_policy
from tinker_cookbook.rl import data_processing
from tinker_cookbook.rl.types import Trajectory, TrajectoryGroup, Transition

# What is made of lists of floats is made in double precision; TensorData still rounds to single.
torch.set_default_dtype(torch.float64)


class Scorer:
    """A sampling client that knows the log-probs of the sequences of one case."""

    def __init__(self, rows: list[list[int]], logprobs: list[list[float | None]]) -> None:
        self.known = {tuple(row): found for row, found in zip(rows, logprobs, strict=True)}

    async def compute_logprobs_async(self, sequence: tinker.ModelInput) -> list[float | None]:
        return self.known[tuple(sequence.to_ints())]


def of_floats(values: list[float]) -> tinker.TensorData:
    return tinker.TensorData.from_torch(torch.tensor(values, dtype=torch.float32))


def to_datum(row: dict) -> tinker.Datum:
    """Of ``tokens``, and of ``mask``, ``logprobs`` and ``advantages`` of all but the first."""
    return tinker.Datum(
        tinker.ModelInput.from_ints(row["tokens"][:-1]),
        {
            "target_tokens": tinker.TensorData.from_torch(torch.tensor(row["tokens"][1:])),
            **{name: of_floats(row[name]) for name in ("mask", "logprobs", "advantages")},
        },
    )


def plain(datum: tinker.Datum) -> dict:
    inputs = {name: tensor.data for name, tensor in datum.loss_fn_inputs.items()}
    return {"model_input": datum.model_input.to_ints(), **inputs}


def to_groups(groups: list) -> list[TrajectoryGroup]:
    """Of groups of members, a dict of ``turns`` and the ``final`` reward each."""
    return [
        TrajectoryGroup(
            [
                Trajectory([to_transition(turn) for turn in member["turns"]], _NOTHING)
                for member in group
            ],
            [member["final"] for member in group],
            [{} for _ in group],
        )
        for group in groups
    ]


def to_transition(turn: dict) -> Transition:
    return Transition(
        tinker.ModelInput.from_ints(turn["prompt"]),
        TokensWithLogprobs(turn["response"], turn["logprobs"]),
        turn["reward"],
        False,
    )


_NOTHING = tinker.ModelInput.empty()


def training_data(groups: list) -> list[dict]:
    made = data_processing.remove_constant_reward_groups(to_groups(groups))
    data, _ = data_processing.assemble_training_data(made, data_processing.compute_advantages(made))
    return [plain(datum) for datum in data]


def distillation(rows: list[dict], scores: list) -> dict:
    """The reverse KL to a teacher, in the advantages."""
    data = [to_datum(row) for row in rows]
    scorers = [Scorer([row["tokens"] for row in rows], scores)] * len(rows)
    kl = train_on_policy.incorporate_kl_penalty(data, scorers, [0] * len(rows), 1.0, 0.0)
    found = asyncio.run(kl)
    return {"metrics": found, "data": [plain(datum) for datum in data]}


def losses() -> list[str]:
    return list(get_args(tinker.types.LossFnType))


if __name__ == "__main__":
    answer_questions(globals())
