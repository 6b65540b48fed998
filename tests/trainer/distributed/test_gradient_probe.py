"""Is a gradient that is not the loss's noticed?"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from ranked_rows import MODEL, TINY

from agentrl_trainer.data.training_row import TrainingRow
from agentrl_trainer.distributed.verl.probe import wrong_gradient
from agentrl_trainer.learner.learner import Learner
from agentrl_trainer.models.loading import load_base


class Off(Learner):
    """Takes the gradient of other rows than those whose loss it computes."""

    change: Callable[[TrainingRow], TrainingRow]

    def forward_backward(self, rows: Sequence[TrainingRow], *args: Any, **options: Any) -> Any:
        if options.get("backward", True):
            rows = [self.change(row) for row in rows]
        return super().forward_backward(rows, *args, **options)


def same(row: TrainingRow) -> TrainingRow:
    return row


def twice(row: TrainingRow) -> TrainingRow:
    return replace(row, advantages=[2 * value for value in row.advantages])


def mean_of_row(row: TrainingRow) -> TrainingRow:
    return replace(row, advantages=[value / row.trained for value in row.advantages])


def prompt_too(row: TrainingRow) -> TrainingRow:
    return replace(
        row, mask=[False, *[True] * (len(row.mask) - 1)], advantages=[1.0] * len(row.mask)
    )


def forgotten(row: TrainingRow) -> TrainingRow:
    return replace(row, advantages=[0.0] * len(row.mask))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (same, None),
        (twice, "its gradient is .* times that of its loss, a sum over the tokens of all rows"),
        (mean_of_row, "its gradient is .* times that of its loss"),
        (prompt_too, "its gradient is .* times that of its loss"),
        (forgotten, "the square of its gradient's norm is 0"),
    ],
)
def test_a_gradient_that_is_not_the_losses_is_named(
    change: Callable[[TrainingRow], TrainingRow], said: str | None, dtype: str
) -> None:
    torch.set_num_threads(1)
    learner = Off(load_base(TINY, **MODEL | {"dtype": dtype}), adapters=("a",), rank=8)
    learner.change = change
    for one in learner.parameters["a"].values():
        one.data.normal_(std=0.3)  # as after a long training
    before = learner.state_dict()
    found = wrong_gradient(learner, "a")
    assert found is None if said is None else re.match(said, found or "")
    assert all(torch.equal(before[key], now) for key, now in learner.state_dict().items())
    assert all(one.grad is None for one in learner.parameters["a"].values())
