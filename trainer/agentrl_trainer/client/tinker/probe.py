"""Ask a service what it computes, before a training relies on it.

Tinker sums a loss over all tokens of all rows, and weights are multiplied into advantages relying
on that (``rows``). A service that divides each row's loss by the row's tokens follows another
objective, while the statistics that it reports look right.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from agentrl_trainer.client.sampling import SamplingClient
from agentrl_trainer.client.training import TrainingClient
from agentrl_trainer.client.types import AdamParams
from agentrl_trainer.data.training_row import TrainingRow

_PROMPT, _TOLD, _REST = [11, 12, 13, 14], 21, [31, 32, 33, 34, 35, 36, 37]
_STEP = AdamParams(learning_rate=1e-3)
_LEAST = 1e-3
"""A change of a log-prob that counts; rounding in bfloat16 alone changes a probe's by less."""
_APART = 0.2
"""A difference between trainer and sampler that rounding in bfloat16 does not explain."""


@dataclass(frozen=True, slots=True)
class Probe:
    """A fresh adapter, which is spoiled, and a sampler of the same base model."""

    training: TrainingClient
    sampling: SamplingClient

    def logprobs(self, tokens: list[int]) -> list[float]:
        """Return the trainer's log-probs of the tokens after the prompt."""
        done = self.training.forward([_row(tokens, [0.0] * len(tokens))], "importance_sampling")
        return done.result().loss_fn_outputs[0]["logprobs"].tolist()[len(_PROMPT) - 1 :]


def wrong_objective(made: Callable[[], Probe]) -> str | None:
    """Return what a service computes otherwise than Tinker; None if nothing was found.

    Args:
        made: called for each question; each needs an adapter that has learned nothing.
    """
    return _other_logprobs(made()) or other_sum(made())


def _other_logprobs(probe: Probe) -> str | None:
    tokens = [*_PROMPT, _TOLD, *_REST]
    trainers = probe.logprobs(tokens)
    found = probe.sampling.compute_logprobs(tokens).result()
    samplers = [value for value in found[len(_PROMPT) :] if value is not None]
    if len(found) != len(tokens) or len(samplers) != len(trainers):
        return f"its sampler does not return a log-prob for each of {len(tokens)} tokens"
    apart = max(abs(one - other) for one, other in zip(trainers, samplers, strict=True))
    if not apart <= _APART:
        return (
            f"its trainer's log-probs differ from its sampler's by up to {apart:.2g}, with an "
            "adapter that has learned nothing (a temperature, or tokens that are shifted?)"
        )
    return None


def other_sum(probe: Probe) -> str | None:
    """Reward a token by 1 where it is alone, and by -2 at the head of a long row.

    Summed, it becomes less likely. Averaged over each row's tokens, it becomes more likely: over
    those that train (1 - 2/8), and over all targets (1/4 - 2/11).
    """
    alone, long = [*_PROMPT, _TOLD], [*_PROMPT, _TOLD, *_REST]
    before = probe.logprobs(long)
    rows = [
        _row(alone, before[:1], [1.0]),
        _row(long, before, [-2.0, *[1e-3] * len(_REST)]),
    ]
    probe.training.forward_backward(rows, "importance_sampling", normalize_by=1.0).result()
    probe.training.optim_step(_STEP).result()
    moved = probe.logprobs(long)[0] - before[0]
    if moved >= _LEAST:
        return "it divides the loss of each row by the row's tokens, where Tinker sums"
    if not moved <= -_LEAST:
        return f"it does not learn: after a step of {_STEP.learning_rate:g} a log-prob is the same"
    return None


def _row(
    tokens: list[int], logprobs: list[float], advantages: list[float] | None = None
) -> TrainingRow:
    told = len(tokens) - len(_PROMPT)
    silent = [0.0] * len(_PROMPT)
    mask = [False] * len(_PROMPT) + [True] * told
    given = advantages or [0.0] * told
    return TrainingRow(tokens, mask, [*silent, *logprobs[-told:]], [*silent, *given])
