"""Rows and ranks of the tests of several trainers."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from agentrl_trainer.data.training_row import TrainingRow
from agentrl_trainer.distributed.plan import RankPlan
from agentrl_trainer.distributed.ranks import Followers, RankedLearner
from agentrl_trainer.learner.learner import Learner
from agentrl_trainer.learner.loss_options import AdamParams

TINY = "agentrl-tiny"
MODEL: dict[str, Any] = {"device": "cpu", "dtype": "float32"}
ADAM = AdamParams(learning_rate=1e-3, grad_clip_norm=1.0)


def groups(
    seed: int, count: int = 6, adapters: tuple[str, ...] = ("a", "b"), prompt: int = 30
) -> list[TrainingRow]:
    """Groups of four rows with a common prompt, of each adapter in turn."""
    draw, rows = random.Random(seed), list[TrainingRow]()
    for group in range(count):
        shared = [draw.randrange(5, 200) for _ in range(prompt)]
        for _ in range(4):
            answer = [draw.randrange(5, 200) for _ in range(draw.randrange(4, 20))]
            mask = [False] * len(shared) + [True] * len(answer)
            advantage, size = draw.gauss(0, 1), len(mask)
            rows.append(
                TrainingRow(
                    shared + answer,
                    mask,
                    [-5.0 * on for on in mask],
                    [advantage * on for on in mask],
                    adapters[group % len(adapters)],
                    {"returns": [advantage] * size, "values": [0.1] * size},
                )
            )
    return rows


def ranks_of(plan: RankPlan, options: dict[str, Any]) -> RankedLearner:
    followers = Followers(plan)
    base = followers.start().load() if plan.shard else plan.load()
    return RankedLearner(followers, base, options)


def distance(one: Learner, ranked: Any) -> float:
    """Of all weights, relative to their norm."""

    def flat(state: dict[str, Tensor]) -> Tensor:
        weights = [state[key].flatten() for key in sorted(state) if key.startswith("weights/")]
        return torch.cat(weights).double()

    ours, theirs = flat(one.state_dict()), flat(ranked.state_dict())
    return float((ours - theirs).norm() / ours.norm())
