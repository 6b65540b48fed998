"""Losses on pairs of answers, one of which is preferred: DPO, IPO, KTO, ORPO and SimPO.

Knows tensors and training rows, not models. The losses are functions of the log-probs of whole
answers, equal to those of TRL 1.16, and are means over pairs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from agentrl_trainer.data.training_row import TrainingRow
from agentrl_trainer.learner.losses import CustomLoss

WITH_REFERENCE = frozenset({"dpo", "ipo", "kto"})
"""Those that need ``reference`` in the rows' ``extra`` (``Learner.with_reference``)."""


def pair_loss(
    name: str, beta: float, *, gamma: float = 1.0, kl: float = 0.0
) -> CustomLoss[TrainingRow]:
    """Make the function that ``forward_backward_custom`` takes.

    The rows are chosen and rejected answers in turn; their masks select the answers. Metrics are
    TRL's; an answer must be ahead to count as accurate.

    Args:
        gamma: SimPO's margin.
        kl: KTO's estimate of KL(policy || reference), not negative: see ``mismatched``.
    """

    def loss(
        rows: Sequence[TrainingRow], logprobs: list[Tensor]
    ) -> tuple[Tensor, Mapping[str, float]]:
        sums = torch.stack([row.sum() for row in logprobs])
        reference = sums.new_tensor([reference_sum(row) for row in rows])
        tokens = sums.new_tensor([row.trained for row in rows])
        ratios, means = sums - reference, sums / tokens
        rewards = beta * (ratios if name in WITH_REFERENCE else means)
        chosen, rejected = rewards[0::2], rewards[1::2]
        if name == "dpo":  # arXiv:2305.18290, equation 7
            value = -logsigmoid(chosen - rejected)
        elif name == "ipo":  # arXiv:2310.12036, equation 17; beta is its tau
            # Means, as the paper's authors told TRL: with sums, long answers have larger margins.
            ratio = ratios / tokens
            value = (ratio[0::2] - ratio[1::2] - 1 / (2 * beta)).square()
        elif name == "kto":  # arXiv:2402.01306, equation 7; both weights are 1
            desirable, undesirable = chosen - beta * kl, beta * kl - rejected
            value = 1 - 0.5 * (torch.sigmoid(desirable) + torch.sigmoid(undesirable))
        elif name == "orpo":  # arXiv:2403.07691, equation 6; beta is its lambda
            # The supervised term is of the chosen answers; TRL's counts tokens of prompts as well.
            odds = means - torch.log(-torch.expm1(means.clamp(max=-1e-7)))
            supervised = -sums[0::2].sum() / tokens[0::2].sum()
            value = supervised - beta * logsigmoid(odds[0::2] - odds[1::2])
        else:  # SimPO, arXiv:2405.14734, equation 6
            value = -logsigmoid(chosen - rejected - gamma)
        return value.mean(), {
            "rewards/chosen": chosen.mean().item(),
            "rewards/rejected": rejected.mean().item(),
            "rewards/margins": (chosen - rejected).mean().item(),
            "rewards/accuracies": (chosen > rejected).float().mean().item(),
        }

    return loss


def reference_sum(row: TrainingRow) -> float:
    """Sum the reference's log-probs of the trained tokens; 0 without a reference."""
    known = row.extra.get("reference", ())
    return sum(value for value, on in zip(known, row.mask, strict=False) if on)


def mismatched(rows: Sequence[TrainingRow]) -> list[TrainingRow]:
    """Give each prompt the answer to another one, as KTO does to estimate the KL divergence.

    The mean of log policy - log reference over these rows, at least 0, is the ``kl`` of ``kto``.
    The rows are chosen and rejected answers in turn, of two pairs at least. A row that would become
    longer than all of ``rows`` is cut, because the context or the memory may end there.
    """
    starts = [row.mask.index(True) for row in rows]
    longest = max(len(row.tokens) for row in rows)
    made: list[TrainingRow] = []
    for at, row in enumerate(rows):
        other = (at + 2) % len(rows)
        answer = slice(starts[other], starts[other] + longest - starts[at])
        tokens = row.tokens[: starts[at]] + rows[other].tokens[answer]
        mask = [False] * starts[at] + rows[other].mask[answer]
        nothing = [0.0] * len(mask)
        made.append(TrainingRow(tokens, mask, nothing, nothing, row.adapter))
    return made
