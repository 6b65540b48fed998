"""Score whole rows of tokens by a number: a reward model's head, its rows and its losses.

Knows tensors and training rows, not models. The head is the one of transformers'
``AutoModelForSequenceClassification`` with one label: linear, without a bias, on the decoder's
output for the last token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from agentrl_trainer.data.training_row import TrainingRow
from agentrl_trainer.learner.losses import CustomLoss
from agentrl_trainer.learner.preference_losses import pair_loss


class RewardHead(nn.Module):
    """``[N, hidden] -> [N]`` float32; 0 before training.

    A random head, as in Stiennon et al. (arXiv:2009.01325), gives scores that a short training does
    not unlearn.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.score = nn.Linear(hidden_size, 1, bias=False)
        nn.init.zeros_(self.score.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.score(hidden.float())[:, 0]


def score_row(tokens: Sequence[int], adapter: str = "default") -> TrainingRow:
    """Make the row by which a learner with reward heads scores ``tokens``.

    The learner reads what it would predict the next token from. So the row has one token more that
    is marked as trained, whose value is never read.
    """
    size = len(tokens) + 1
    mask = [False] * len(tokens) + [True]
    return TrainingRow([*tokens, 0], mask, [0.0] * size, [0.0] * size, adapter)


pair_scores_loss = pair_loss("dpo", beta=1.0)
"""Of ``score_row``s of chosen and rejected answers in turn: the mean of -log sigmoid(chosen -
rejected) (Bradley and Terry, 1952; arXiv:2203.02155, equation 1), which is DPO's of scores without
a reference, and TRL's metrics of it."""


def regression_loss(targets: Sequence[float]) -> CustomLoss[TrainingRow]:
    """Make the mean squared error of ``score_row``s for ``forward_backward_custom``.

    ``rewards/explained`` is the share of the targets' variance that the scores explain (R squared;
    0 where the targets have none), ``rewards/error`` the root of the loss. ``rewards/accuracies``
    is the share of pairs with different targets whose scores are in the same order.
    """

    def loss(_: object, scores: list[Tensor]) -> tuple[Tensor, Mapping[str, float]]:
        found = torch.stack([row.sum() for row in scores])
        wanted = found.new_tensor(targets)
        error = (found - wanted).square().mean()
        spread = (wanted - wanted.mean()).square().mean().item()
        explained = 1 - error.item() / spread if spread else 0.0
        metrics = {"rewards/explained": explained, "rewards/error": error.item() ** 0.5}
        if bool((better := wanted[:, None] > wanted).any()):
            in_order = (found[:, None] > found)[better]
            metrics["rewards/accuracies"] = in_order.float().mean().item()
        return error, metrics

    return loss
