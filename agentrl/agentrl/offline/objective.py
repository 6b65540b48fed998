"""Define what an offline training learns: the only part in which its commands differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from agentrl_trainer.client import AdamParams, TrainingClient

E = TypeVar("E", contravariant=True)


class Objective(Protocol[E]):
    """How examples become updates. It keeps no state: a resumed run makes a new one."""

    name: str
    """Of the command and the kind of the run: ``sft``, ``prefer``, ``reward-model``."""

    def update(
        self, client: TrainingClient, examples: Sequence[E], adam: AdamParams
    ) -> dict[str, float]:
        """Make one optimizer step; return its metrics, of which ``loss`` is one.

        ``grad_norm`` and ``skipped_non_finite`` are those of ``optim_step``, if they are there.
        """
        ...

    def measure(self, client: TrainingClient, examples: Sequence[E]) -> dict[str, float]:
        """Measure held-out examples without a gradient; ``loss`` is one of the metrics."""
        ...
