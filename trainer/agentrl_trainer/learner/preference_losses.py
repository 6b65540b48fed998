"""Losses on pairs of answers, one of which is preferred: DPO, IPO, KTO, ORPO and SimPO.

Knows tensors and training rows, not models. All are pure functions of the log-probs of whole
answers, equal to those of TRL 1.16, and are means over pairs. ``pair_loss`` makes a function for
``forward_backward_custom`` of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from agentrl_trainer.data.training_row import TrainingRow
from agentrl_trainer.learner.losses import CustomLoss


@dataclass(frozen=True, slots=True)
class PairLogprobs:
    """Log-probs of both answers of each pair, summed over their trained tokens; all [pairs]."""

    chosen: Tensor
    rejected: Tensor
    reference_chosen: Tensor  # under the reference policy
    reference_rejected: Tensor
    chosen_tokens: Tensor  # how many tokens an answer has
    rejected_tokens: Tensor

    @property
    def ratios(self) -> tuple[Tensor, Tensor]:
        """log policy - log reference of the chosen and of the rejected answers."""
        return self.chosen - self.reference_chosen, self.rejected - self.reference_rejected

    @property
    def means(self) -> tuple[Tensor, Tensor]:
        """The log-probs per token of the chosen and of the rejected answers."""
        return self.chosen / self.chosen_tokens, self.rejected / self.rejected_tokens


class Outcome(NamedTuple):
    """A scalar loss, and what the policy's implicit reward of the answers is, [pairs] each."""

    loss: Tensor
    chosen: Tensor
    rejected: Tensor


@dataclass(frozen=True, slots=True)
class PreferenceOptions:
    """The strength of a loss, and what only some of them need."""

    beta: float
    gamma: float = 1.0  # SimPO's margin
    kl: float = 0.0  # KTO's estimate of KL(policy || reference), not negative


def dpo(pairs: PairLogprobs, options: PreferenceOptions) -> Outcome:
    """Direct preference optimization (arXiv:2305.18290, equation 7)."""
    chosen, rejected = (options.beta * ratio for ratio in pairs.ratios)
    return Outcome(-logsigmoid(chosen - rejected).mean(), chosen, rejected)


def ipo(pairs: PairLogprobs, options: PreferenceOptions) -> Outcome:
    """Identity preference optimization (arXiv:2310.12036, equation 17), beta is its tau.

    Ratios are means over tokens, as the paper's authors told TRL: sums would make the target margin
    depend on the length of answers.
    """
    chosen, rejected = pairs.ratios
    margin = chosen / pairs.chosen_tokens - rejected / pairs.rejected_tokens
    loss = (margin - 1 / (2 * options.beta)).square().mean()
    return Outcome(loss, options.beta * chosen, options.beta * rejected)


def kto(pairs: PairLogprobs, options: PreferenceOptions) -> Outcome:
    """Kahneman-Tversky optimization (arXiv:2402.01306, equation 7); both weights are 1.

    Chosen answers are its desirable examples, rejected ones its undesirable. ``options.kl``: see
    ``mismatched``.
    """
    chosen, rejected = (options.beta * ratio for ratio in pairs.ratios)
    kl = options.beta * options.kl
    loss = 1 - 0.5 * (torch.sigmoid(chosen - kl) + torch.sigmoid(kl - rejected)).mean()
    return Outcome(loss, chosen, rejected)


def orpo(pairs: PairLogprobs, options: PreferenceOptions) -> Outcome:
    """Odds ratio preference optimization (arXiv:2403.07691, equation 6), beta is its lambda.

    Needs no reference. Its supervised term is the cross-entropy per token of the chosen answers, as
    in the paper; TRL's counts the tokens of the prompts as well.
    """
    chosen, rejected = pairs.means
    odds = (chosen - _log_1_minus_exp(chosen)) - (rejected - _log_1_minus_exp(rejected))
    supervised = -pairs.chosen.sum() / pairs.chosen_tokens.sum()
    loss = supervised - options.beta * logsigmoid(odds).mean()
    return Outcome(loss, options.beta * chosen, options.beta * rejected)


def simpo(pairs: PairLogprobs, options: PreferenceOptions) -> Outcome:
    """Simple preference optimization (arXiv:2405.14734, equation 6). Needs no reference."""
    chosen, rejected = (options.beta * mean for mean in pairs.means)
    return Outcome(-logsigmoid(chosen - rejected - options.gamma).mean(), chosen, rejected)


def _log_1_minus_exp(x: Tensor) -> Tensor:
    """Compute log(1 - e^x) for x < 0 without a loss of digits (Maechler, "Accurately computing
    log(1 - exp(-|a|))", 2012). Where rounding has made x 0, it is finite without a gradient."""
    x = x.clamp(max=-1e-7)
    near = x > -0.6931472
    # Both branches are differentiated: where one does not apply, it gets a harmless argument.
    small = torch.log(-torch.expm1(torch.where(near, x, -1.0)))
    return torch.where(near, small, torch.log1p(-torch.exp(torch.where(near, -1.0, x))))


PreferenceFunction = Callable[[PairLogprobs, PreferenceOptions], Outcome]
PREFERENCE_LOSSES: Mapping[str, PreferenceFunction] = {
    "dpo": dpo, "ipo": ipo, "kto": kto, "orpo": orpo, "simpo": simpo,
}  # fmt: skip
DEFAULT_BETA = {"dpo": 0.1, "ipo": 0.1, "kto": 0.1, "orpo": 0.1, "simpo": 2.0}
WITH_REFERENCE = frozenset({"dpo", "ipo", "kto"})
"""Those that need ``reference`` in the rows' ``extra`` (``Learner.with_reference``)."""


def pair_loss(name: str, options: PreferenceOptions) -> CustomLoss[TrainingRow]:
    """Make the function that ``forward_backward_custom`` takes.

    The rows are chosen and rejected answers in turn; their masks select the answers. Metrics are
    TRL's: ``rewards/chosen``, ``rewards/rejected``, ``rewards/margins``, ``rewards/accuracies``.
    """
    function = PREFERENCE_LOSSES[name]

    def loss(
        rows: Sequence[TrainingRow], logprobs: list[Tensor]
    ) -> tuple[Tensor, Mapping[str, float]]:
        outcome = function(pairs_of(rows, logprobs), options)
        return outcome.loss, preference_metrics(outcome.chosen, outcome.rejected)

    return loss


def pairs_of(rows: Sequence[TrainingRow], logprobs: Sequence[Tensor]) -> PairLogprobs:
    """Sum the log-probs of rows that are chosen and rejected answers in turn; without a
    ``reference`` in the rows it counts as 0."""
    sums = torch.stack([row.sum() for row in logprobs])
    reference = sums.new_tensor([reference_sum(row) for row in rows])
    tokens = sums.new_tensor([row.trained for row in rows])
    columns = (column[at::2] for column in (sums, reference, tokens) for at in (0, 1))
    return PairLogprobs(*columns)


def reference_sum(row: TrainingRow) -> float:
    """Sum the reference's log-probs of the trained tokens; 0 without a reference."""
    known = row.extra.get("reference", ())
    return sum(value for value, on in zip(known, row.mask, strict=False) if on)


def preference_metrics(chosen: Tensor, rejected: Tensor) -> dict[str, float]:
    """Compute TRL's metrics of rewards [pairs]; an answer must be ahead to count as accurate."""
    chosen, rejected = chosen.detach(), rejected.detach()
    return {
        "rewards/chosen": chosen.mean().item(),
        "rewards/rejected": rejected.mean().item(),
        "rewards/margins": (chosen - rejected).mean().item(),
        "rewards/accuracies": (chosen > rejected).float().mean().item(),
    }


def mismatched(rows: Sequence[TrainingRow]) -> list[TrainingRow]:
    """Give each prompt the answer to another one, as KTO does to estimate the KL divergence.

    The mean of log policy - log reference over these rows, at least 0, is the ``kl`` of ``kto``.
    The rows are chosen and rejected answers in turn, of two pairs at least.
    """
    starts = [row.mask.index(True) for row in rows]
    made: list[TrainingRow] = []
    for at, row in enumerate(rows):
        start, other = starts[at], (at + 2) % len(rows)
        answer = rows[other].tokens[starts[other] :]
        mask = [False] * start + rows[other].mask[starts[other] :]
        nothing = [0.0] * len(mask)
        made.append(
            replace(row, tokens=[*row.tokens[:start], *answer], mask=mask, logprobs=nothing,
                    advantages=nothing, extra={})
        )  # fmt: skip
    return made
