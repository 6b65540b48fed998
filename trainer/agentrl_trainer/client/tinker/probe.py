"""Ask a service what it computes, before a training relies on it.

Tinker sums a loss over all tokens of all requests of a step, and multiplies it by weights, which
may be 0. Weights and means are multiplied into advantages relying on that (``rows``), and losses of
our own into weights. A service that divides by numbers of its own follows another objective, while
the statistics that it reports look right.

Each question is one step about one token, ``_TOLD``: what its rows ask for adds up to making the
token less likely, and by another objective to making it more likely.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from agentrl_trainer.client.sampling import SamplingClient
from agentrl_trainer.client.training import TrainingClient
from agentrl_trainer.client.types import AdamParams, Data, Datum, ModelInput
from agentrl_trainer.data.training_row import TrainingRow

_PROMPT, _TOLD, _REST = [11, 12, 13, 14], 21, [31, 32, 33, 34, 35, 36, 37]
_TOKENS = [*_PROMPT, _TOLD, *_REST]
_STEP = AdamParams(learning_rate=1e-3)
_LEAST = 1e-3
"""A change of a log-prob that counts; rounding in bfloat16 alone changes a probe's by less."""
_APART = 0.2
"""A difference between trainer and sampler that rounding in bfloat16 does not explain."""

Credits = list[float]
"""Advantages or weights of the tokens after the prompt; the row ends with them."""
_UP, _DOWN, _ZERO = [1.0], [-1.5], [0.0]
_LONG = [-1.5, *[1e-3] * len(_REST)]


@dataclass(frozen=True, slots=True)
class Probe:
    """A fresh adapter, which is spoiled, and a sampler of the same base model."""

    training: TrainingClient
    sampling: SamplingClient

    def logprobs(self) -> list[float]:
        """Return the trainer's log-probs of the tokens after the prompt."""
        nothing = [0.0] * (len(_TOKENS) - len(_PROMPT))
        done = self.training.forward([_row(nothing, nothing)], "importance_sampling")
        return done.result().loss_fn_outputs[0]["logprobs"].tolist()[len(_PROMPT) - 1 :]


@dataclass(frozen=True, slots=True)
class Question:
    """A step, and what is wrong with a service where it makes the token more likely."""

    name: str
    otherwise: str
    rewards: tuple[list[Credits], ...]
    """Rows of each ``importance_sampling`` request."""
    weights: tuple[list[Credits], ...] = ()
    """Rows of each ``cross_entropy`` request."""


QUESTIONS = (
    # Averaged over tokens that train: 1 - 1.5/8; over all targets: 1/4 - 1.5/11.
    Question(
        "sums the loss over tokens",
        "it divides the loss of each row by the row's tokens, where Tinker sums",
        rewards=([_UP, _LONG],),
    ),
    Question(
        "sums the loss over requests",
        "it divides the loss of each request by its rows or tokens, or forgets earlier requests, "
        "where Tinker sums",
        rewards=([_DOWN, _ZERO, _ZERO], [_UP]),
    ),
    Question(
        "a token of weight 0 does not learn",
        "it learns from tokens whose weight is 0, or divides a loss by the sum of its weights",
        rewards=(),
        weights=([[-0.1], _ZERO, _ZERO],),
    ),
)
_ALL = Question(
    "computes a weighted sum",
    "its step makes a token more likely that a weighted sum makes less likely",
    rewards=([_LONG, _ZERO, _ZERO], [_UP]),
    weights=([[-0.1], _ZERO, _ZERO],),
)
"""All questions at once."""


def wrong_objective(made: Callable[[], Probe]) -> str | None:
    """Return what a service computes otherwise than Tinker; None if nothing was found.

    Args:
        made: called for each step; each needs an adapter that has learned nothing.
    """
    probe = made()
    before = probe.logprobs()
    if wrong := _other_logprobs(probe, before):
        return wrong
    if wrong := _asked(probe, _ALL, before):
        return next(filter(None, (asked(made(), one) for one in QUESTIONS)), wrong)
    return None


def asked(probe: Probe, question: Question) -> str | None:
    """Return what a service does otherwise; None if it answers the question as Tinker does."""
    return _asked(probe, question, probe.logprobs())


def _asked(probe: Probe, question: Question, before: list[float]) -> str | None:
    def learn(data: Data, loss: str) -> None:
        probe.training.forward_backward(data, loss, normalize_by=1.0).result()

    for rewards in question.rewards:
        learn([_row(one, before) for one in rewards], "importance_sampling")
    for weights in question.weights:
        learn([_shown(one) for one in weights], "cross_entropy")
    probe.training.optim_step(_STEP).result()
    moved = probe.logprobs()[0] - before[0]
    if moved >= _LEAST:
        return question.otherwise
    if not moved <= -_LEAST:
        return f"it does not learn: a step of {_STEP.learning_rate:g} changes a log-prob by {moved}"
    return None


def _other_logprobs(probe: Probe, trainers: list[float]) -> str | None:
    found = probe.sampling.compute_logprobs(_TOKENS).result()
    samplers = [value for value in found[len(_PROMPT) :] if value is not None]
    if len(found) != len(_TOKENS) or len(samplers) != len(trainers):
        return f"its sampler does not return a log-prob for each of {len(_TOKENS)} tokens"
    apart = max(abs(one - other) for one, other in zip(trainers, samplers, strict=True))
    if not apart <= _APART:
        return (
            f"its trainer's log-probs differ from its sampler's by up to {apart:.2g}, with an "
            "adapter that has learned nothing (a temperature, or tokens that are shifted?)"
        )
    return None


def _row(advantages: Credits, logprobs: list[float]) -> TrainingRow:
    told, silent = len(advantages), [0.0] * len(_PROMPT)
    mask = [False] * len(_PROMPT) + [True] * told
    tokens = _TOKENS[: len(mask)]
    return TrainingRow(tokens, mask, [*silent, *logprobs[:told]], [*silent, *advantages])


def _shown(weights: Credits) -> Datum:
    tokens, silent = _TOKENS[: len(_PROMPT) + len(weights)], [0.0] * (len(_PROMPT) - 1)
    read = ModelInput.from_ints(tokens[:-1])
    return Datum(read, {"target_tokens": tokens[1:], "weights": [*silent, *weights]})
