"""Ask a learner whether its gradient is that of its loss, before a training relies on it.

Settings of verl change who computes which tokens, and by what the sum is divided afterwards. A
gradient that is twice as large, or a mean over each row, would train all the same, otherwise.
"""

from __future__ import annotations

import math
import random
from typing import Any

from agentrl_trainer.data.training_row import TrainingRow

_MOVE = 20.0
"""How far steps along the gradient move the loss of ``_rows``: more than bfloat16 rounds it."""
_APART = 1.5
"""A factor that curvature, and rounding in bfloat16, explain."""


def wrong_gradient(learner: Any, adapter: str) -> str | None:
    """Return how a learner's gradient differs from its loss's; None if it does not.

    The loss, a sum over the tokens of rows of unequal length, should change along its gradient g by
    ``|g|^2`` times the step: central differences, from forward passes alone.

    Args:
        learner: has the methods of a ``Learner``.
        adapter: of the learner; its weights are the same afterwards.
    """
    rows = _rows(adapter)
    learner.forward_backward(rows, "cross_entropy", None, 1.0)
    weights = [one for one in learner.parameters[adapter].values() if one.grad is not None]
    slopes = [one.grad.clone() for one in weights]
    learner.discard_gradients([adapter])
    square = sum(float(slope.square().sum()) for slope in slopes)
    if not 0 < square < math.inf:
        return f"the square of its gradient's norm is {square:g}"
    before = [one.detach().clone() for one in weights]
    losses: list[float] = []
    for step in (_MOVE / square, -_MOVE / square):
        for one, old, slope in zip(weights, before, slopes, strict=True):
            one.data.copy_(old + step * slope)
        stats = learner.forward_backward(rows, "cross_entropy", None, 1.0, backward=False)
        losses.append(stats.loss)
    for one, old in zip(weights, before, strict=True):
        one.data.copy_(old)
    ratio = 2 * _MOVE / (losses[0] - losses[1])
    if 1 / _APART <= ratio <= _APART:
        return None
    return f"its gradient is {ratio:.2g} times that of its loss, a sum over the tokens of all rows"


def _rows(adapter: str) -> list[TrainingRow]:
    """Rows of unequal length, not all of whose tokens train."""
    draw, rows = random.Random(0), list[TrainingRow]()
    for length in (3, 17, 6, 30):
        tokens = [draw.randrange(10, 90) for _ in range(4 + length)]
        mask = [False] * 4 + [draw.random() < 0.7 for _ in range(length)]
        even = [float(on) for on in mask]
        rows.append(TrainingRow(tokens, mask, [0.0] * len(tokens), even, adapter))
    return rows
