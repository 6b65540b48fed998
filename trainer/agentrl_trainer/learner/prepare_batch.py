"""What one step's datums need before its optimizer passes.

Knows datums and what to ask of a policy; not rollouts, configuration files or the store.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from agentrl_trainer.data.advantages import Scaling
from agentrl_trainer.data.packing import TrainingRow
from agentrl_trainer.learner.losses import LOSSES
from agentrl_trainer.learner.value_head import with_gae


@dataclass(frozen=True, slots=True)
class Gae:
    """See ``values.with_gae``."""

    discount: float = 1.0
    trace: float = 0.95
    whiten: bool = False
    scaling: Scaling = field(default_factory=Scaling)  # of whitening


@dataclass(frozen=True, slots=True)
class UpdateSettings:
    """How datums become updates."""

    loss: str = "importance_sampling"
    loss_config: Mapping[str, float | str] = field(default_factory=dict[str, float | str])
    epochs: int = 1  # optimizer passes over the datums
    reference: str | None = None  # the adapter of the KL; None: the base model
    gae: Gae | None = None  # advantages come from the learner's value function


class Policy(Protocol):
    """What can be asked of a policy in training: a ``Learner``, or one on another machine."""

    def with_temperature(self, datums: Sequence[TrainingRow]) -> list[TrainingRow]: ...
    def with_reference(
        self, datums: Sequence[TrainingRow], adapter: str | None = None
    ) -> list[TrainingRow]: ...
    def with_proximal(self, datums: Sequence[TrainingRow]) -> list[TrainingRow]: ...
    def values(self, datums: Sequence[TrainingRow]) -> list[list[float]]: ...


def prepare(
    policy: Policy, datums: Sequence[TrainingRow], settings: UpdateSettings
) -> list[TrainingRow]:
    """The datums with all that depends on the policy before the update."""
    options = LOSSES[settings.loss].options(settings.loss_config)
    done = policy.with_temperature(datums)
    if settings.gae is not None:
        how = settings.gae
        done = with_gae(
            done,
            policy.values(done),
            discount=how.discount,
            trace=how.trace,
            whiten=how.whiten,
            scaling=how.scaling,
        )
    if options["kl_coef"]:
        done = policy.with_reference(done, settings.reference)
    # In a single pass the policy at hand is the proximal one: the loss sees to that by itself.
    if options["correction"] != "none" and settings.epochs > 1:
        done = policy.with_proximal(done)
    return done
