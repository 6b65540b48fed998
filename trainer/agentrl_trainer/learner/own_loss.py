"""Make a function that a user wrote a loss: ``algorithm.loss = "my_module:loss"``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from agentrl_trainer.learner.loss_options import OPTIONS_OF, Options
from agentrl_trainer.learner.losses import LOSSES, Loss, Tokens
from agentrl_trainer.own_function import FunctionError, said_by

OwnLoss: TypeAlias = Callable[[Tokens], Tensor | tuple[Tensor, Tensor]]
"""``loss(tokens)`` returns each token's term of the loss, [N], which is summed; or a pair with a
bool tensor [N] of where its clip or mask took effect, which the metric ``clip_fraction`` shows.
Correction, KL and length normalization go around it as around every formula."""


def add_loss(name: str, function: OwnLoss) -> None:
    """Make a function a loss of this process, without options, after a try on made-up tokens.

    Raises:
        FunctionError: it raised, returned something else, or its value does not depend on ``lp``.
    """

    def formula(tokens: Tokens, _: object) -> tuple[Tensor, Tensor | None]:
        with said_by(function, "algorithm.loss"):
            found = function(tokens)
            term, clipped = found if isinstance(found, tuple) else (found, None)
            for one in (term,) if clipped is None else (term, clipped):
                if not isinstance(one, Tensor) or one.shape != tokens.lp.shape:
                    got = f"shape {list(one.shape)}" if isinstance(one, Tensor) else repr(one)
                    want = f"a tensor of shape {list(tokens.lp.shape)}, one number for each token"
                    raise FunctionError(f"it must return {want}, not {got}")
        return term, clipped

    lp = torch.tensor([-0.5, -1.0, -2.0], requires_grad=True)
    advantages, sequences = torch.tensor([1.0, -1.0, 0.5]), torch.tensor([0, 0, 1])
    ratio = lp - lp.detach() + 0.1
    term, _ = formula(Tokens(lp, ratio, ratio, advantages, sequences), None)
    if not term.requires_grad:
        said = "its value has no gradient: it must depend on tokens.lp or tokens.log_ratio"
        raise FunctionError(f"algorithm.loss: {name}: {said}")
    OPTIONS_OF[name] = Options
    LOSSES[name] = Loss(name, formula)
