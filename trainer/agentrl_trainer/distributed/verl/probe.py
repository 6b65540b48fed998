"""Ask a learner whether its gradient is that of its loss, before a training relies on it.

Options of verl can change what a loss is divided by, and what is added up. Training would then go
on with a wrong gradient, unnoticed.
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

    The loss is minus the sum of log-probs, of tokens in rows of unequal length. Steps along its
    gradient g, forward and backward, should change it by ``|g|^2`` times their length (central
    differences), which forward passes tell.

    Args:
        learner: has the methods of a ``Learner``.
        adapter: of the learner. Meanwhile its B matrices are zero; afterwards it is as before.
    """
    rows, own = _rows(adapter), learner.parameters[adapter]
    before = {key: one.detach().clone() for key, one in own.items()}
    try:
        for key, one in own.items():
            if "lora_B" in key or "lora_embedding_B" in key:
                one.data.zero_()
        at = {key: one.detach().clone() for key, one in own.items()}
        learner.forward_backward(rows, "cross_entropy", None, 1.0)
        slopes = {key: one.grad.clone() for key, one in own.items() if one.grad is not None}
        if missing := own.keys() - slopes.keys():
            return f"{len(missing)} tensors of the adapter have no gradient, {min(missing)} is one"
        square = sum(float(slope.square().sum()) for slope in slopes.values())
        if not 0 < square < math.inf:
            return f"the square of its gradient's norm is {square:g}"
        losses: list[float] = []
        for step in (_MOVE / square, -_MOVE / square):
            for key, slope in slopes.items():
                own[key].data.copy_(at[key] + step * slope)
            losses.append(-sum(map(sum, learner.forward(rows))))
    finally:
        learner.discard_gradients([adapter])
        for key, one in own.items():
            one.data.copy_(before[key])
    moved = losses[0] - losses[1]
    ratio = 2 * _MOVE / moved if moved else math.inf
    if 1 / _APART <= ratio <= _APART:
        return None
    return f"its gradient is {ratio:.2g} times that of its loss, a sum over the tokens of all rows"


def _rows(adapter: str) -> list[TrainingRow]:
    """Rows of unequal length, not all of whose tokens train."""
    draw, rows = random.Random(0), list[TrainingRow]()
    for length in (3, 17, 6, 30):
        tokens = [draw.randrange(10, 90) for _ in range(4 + length)]
        mask = [False] * 4 + [draw.random() < 0.7 for _ in range(length - 1)] + [True]
        even = [float(on) for on in mask]
        rows.append(TrainingRow(tokens, mask, [0.0] * len(tokens), even, adapter))
    return rows
