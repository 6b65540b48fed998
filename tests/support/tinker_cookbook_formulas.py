"""Runs in the cookbook's own virtual environment: its functions on given numbers, a JSON line each.

No model and no server.
"""

from __future__ import annotations

from typing import get_args

import tinker
import torch
from peer import answer_questions
from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.rl import data_processing
from tinker_cookbook.rl.types import Trajectory, TrajectoryGroup, Transition

# What is made of lists of floats is made in double precision; TensorData still rounds to single.
torch.set_default_dtype(torch.float64)


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
    return [
        {"model_input": datum.model_input.to_ints()}
        | {name: tensor.data for name, tensor in datum.loss_fn_inputs.items()}
        for datum in data
    ]


def losses() -> list[str]:
    return list(get_args(tinker.types.LossFnType))


if __name__ == "__main__":
    answer_questions(globals())
