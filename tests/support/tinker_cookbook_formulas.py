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
from tinker_cookbook.eval.benchmarks._runner import _compute_pass_at_k
from tinker_cookbook.rl import data_processing, metric_util, metrics
from tinker_cookbook.rl.types import Trajectory, TrajectoryGroup, Transition
from tinker_cookbook.supervised.common import compute_mean_nll, datum_from_model_input_weights
from tinker_cookbook.utils.lr_scheduling import compute_schedule_lr_multiplier

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


def advantages(rewards: list[list[float]]) -> list[list[float]]:
    groups = [[{"turns": [], "final": reward} for reward in group] for group in rewards]
    return [row.tolist() for row in data_processing.compute_advantages(to_groups(groups))]


def training_data(groups: list, drop_constant: bool = True) -> list[dict]:
    made = to_groups(groups)
    if drop_constant:
        made = data_processing.remove_constant_reward_groups(made)
    data, _ = data_processing.assemble_training_data(made, data_processing.compute_advantages(made))
    return [plain(datum) for datum in data]


def trajectory_metrics(groups: list) -> dict:
    return metric_util.compute_trajectory_metrics(to_groups(groups), [["all"]] * len(groups))


def kl_sample_train(rows: list[dict], training: list[list[float]]) -> dict:
    return metrics.compute_kl_sample_train(
        [to_datum(row) for row in rows], [torch.tensor(found) for found in training]
    )


def post_kl(rows: list[dict], scores: list[list[float | None]]) -> dict:
    data = [to_datum(row) for row in rows]
    scorer = Scorer([row["tokens"] for row in rows], scores)
    return asyncio.run(metrics.compute_post_kl(data, scorer))


def kl_penalty(rows: list[dict], scores: list, coef: float) -> dict:
    """The KL to a reference policy, in the advantages."""
    data = [to_datum(row) for row in rows]
    scorer = Scorer([row["tokens"] for row in rows], scores)
    found = asyncio.run(metrics.incorporate_kl_penalty(data, scorer, coef, 0.0))
    return {"metrics": found, "data": [plain(datum) for datum in data]}


def distillation(rows: list[dict], scores: list) -> dict:
    """The reverse KL to a teacher, in the advantages."""
    data = [to_datum(row) for row in rows]
    scorers = [Scorer([row["tokens"] for row in rows], scores)] * len(rows)
    kl = train_on_policy.incorporate_kl_penalty(data, scorers, [0] * len(rows), 1.0, 0.0)
    found = asyncio.run(kl)
    return {"metrics": found, "data": [plain(datum) for datum in data]}


def discounted(values: list[float], discount: float) -> list[float]:
    return metrics.discounted_future_sum_vectorized(torch.tensor(values), discount).tolist()


def mean_nll(logprobs: list[list[float]], weights: list[list[float]]) -> float:
    return compute_mean_nll([of_floats(row) for row in logprobs], [of_floats(w) for w in weights])


def supervised(tokens: list[int], weights: list[float], reduction: str) -> dict:
    row = tinker.ModelInput.from_ints(tokens)
    return plain(datum_from_model_input_weights(row, torch.tensor(weights), reduction=reduction))


def schedule(name: str, steps: int) -> list[float]:
    return [compute_schedule_lr_multiplier(name, step, steps) for step in range(steps)]


def pass_at_k(rewards: dict[str, list[float]], ks: list[int]) -> list[float]:
    found = _compute_pass_at_k(rewards, ks)
    return [found[k] for k in ks]


def losses() -> list[str]:
    return list(get_args(tinker.types.LossFnType))


if __name__ == "__main__":
    answer_questions(globals())
