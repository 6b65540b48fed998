"""Add to a step's rows what its optimizer passes need from the policy before the update.

Knows rows and what a policy computes for them; no torch, no configuration files and no store.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any, Protocol

from agentrl_trainer.data.advantages import Scaling, token_advantages
from agentrl_trainer.data.training_row import TrainingRow
from agentrl_trainer.learner.loss_options import LossConfig, parse_loss_options


class RefusedRows(ValueError):
    """The backend cannot learn from these rows, and has computed nothing."""


@dataclass(frozen=True, slots=True)
class Gae:
    """Options of generalized advantage estimation: see ``with_gae``."""

    discount: float = 1.0
    trace: float = 0.95
    whiten: bool = False
    scaling: Scaling = field(default_factory=Scaling)  # of whitening


@dataclass(frozen=True, slots=True)
class UpdateSettings:
    """How rows become updates."""

    loss: str = "importance_sampling"
    loss_config: Mapping[str, float | str] = field(default_factory=dict[str, float | str])
    epochs: int = 1  # optimizer passes over the rows
    reference: str | None = None  # the adapter of the KL; None: the base model
    gae: Gae | None = None  # take advantages from the learner's value function


class Policy(Protocol):
    """A policy in training: a ``Learner``, or one on another machine."""

    def with_temperature(self, rows: Sequence[TrainingRow]) -> list[TrainingRow]: ...
    def with_reference(
        self, rows: Sequence[TrainingRow], adapter: str | None = None
    ) -> list[TrainingRow]: ...
    def with_proximal(self, rows: Sequence[TrainingRow]) -> list[TrainingRow]: ...
    def values(self, rows: Sequence[TrainingRow]) -> list[list[float]]: ...


def prepare(
    policy: Policy, rows: Sequence[TrainingRow], settings: UpdateSettings
) -> list[TrainingRow]:
    """Add all columns that depend on the policy before the update."""
    options = parse_loss_options(settings.loss, settings.loss_config)
    done = policy.with_temperature(rows)
    if settings.gae is not None:
        done = with_gae(done, policy.values(done), settings.gae)
    if options.kl.coef:
        done = policy.with_reference(done, settings.reference)
    # With a single pass the loss itself takes the policy at hand as the proximal one.
    if options.correction.mode != "none" and settings.epochs > 1:
        done = policy.with_proximal(done)
    return done


def with_gae(
    rows: Sequence[TrainingRow], values: Sequence[list[float]], gae: Gae | None = None
) -> list[TrainingRow]:
    """Compute advantages, ``values`` and ``returns`` from the rows' ``rewards``.

    One step in time is one trained token: tokens of an environment or of another agent in between
    belong to the transition. ``whiten``: center and scale the advantages over the trained tokens of
    all rows, (A - mean) / (std + epsilon), as PPO implementations do per batch (arXiv:2005.12729);
    the returns stay as they are.

    Raises:
        ValueError: a row has no ``rewards``.
    """
    gae = gae or Gae()
    results: list[tuple[list[float], list[float]]] = []
    for row, predicted in zip(rows, values, strict=True):
        if "rewards" not in row.extra:
            raise ValueError("rows need rewards in extra for generalized advantage estimation")
        columns = (list(compress(x, row.mask)) for x in (row.extra["rewards"], predicted))
        results.append(token_advantages(*columns, discount=gae.discount, trace=gae.trace))
    mean, divisor = 0.0, 1.0
    if gae.whiten:
        every = [a for advantages, _ in results for a in advantages if math.isfinite(a)]
        mean, divisor = math.fsum(every) / max(len(every), 1), gae.scaling.divisor(every)
    done: list[TrainingRow] = []
    for row, predicted, (advantages, returns) in zip(rows, values, results, strict=True):
        credit = _spread([(value - mean) / divisor for value in advantages], row.mask)
        extra = {**row.extra, "values": predicted, "returns": _spread(returns, row.mask)}
        done.append(replace(row, advantages=credit, extra=extra))
    return done


def finite_rows(
    learner: Any, rows: Sequence[TrainingRow], loss: str, loss_config: LossConfig | None = None
) -> list[int]:
    """Find the rows whose own loss and gradient are finite; drops accumulated gradients.

    ``learner``: has AdapterOptimizers' methods, and ``forward_backward``.
    """
    own, tokens = {row.adapter for row in rows}, float(sum(row.trained for row in rows))

    def finite(some: Sequence[int]) -> bool:
        learner.discard_gradients(own)
        learner.forward_backward([rows[i] for i in some], loss, loss_config, tokens or None)
        return not learner.non_finite & own and learner.gradients_finite(own)

    found = finite_parts(range(len(rows)), finite)
    learner.discard_gradients(own)
    return found


def finite_parts(some: Sequence[int], finite: Callable[[Sequence[int]], bool]) -> list[int]:
    """Select what is finite, by halving what is not as a whole."""
    if finite(some):
        return list(some)
    middle = len(some) // 2
    halves = (some[:middle], some[middle:]) if middle else ()
    return [index for half in halves for index in finite_parts(half, finite)]


def _spread(values: Sequence[float], mask: Sequence[bool]) -> list[float]:
    """Put values where the mask is on, 0 elsewhere."""
    left = iter(values)
    return [next(left) if on else 0.0 for on in mask]
