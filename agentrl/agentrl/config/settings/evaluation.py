"""Evaluations of held-out tasks, and the rollouts of ``agentrl check``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from agentrl.config.field_types import Count, Finite, Names, Share, Table
from agentrl.config.settings.sampler import SamplerSettings


class EvaluationSettings(Table):
    """Rollouts of held-out tasks."""

    samples: Count = 1
    """Rollouts per held-out task, for pass@k."""
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    """Sampling temperature of evaluations, whatever the agent requests. By default greedy (0); with
    several samples per task, the training's (`agentrl eval`: 1)."""
    success_reward: Finite = 1.0
    """Reward from which an evaluated rollout counts as a success."""

    def sample_several(self, sampler: SamplerSettings) -> None:
        """Take the sampler's temperature for several samples, unless one is given."""
        if self.samples > 1 and "temperature" not in self.model_fields_set:
            self.temperature = sampler.temperature
            # Stays unset, so that each trial of a sweep takes its own sampler.temperature.
            self.model_fields_set.discard("temperature")


class EvalEvaluationSettings(EvaluationSettings):
    tasks: Path
    """Tasks to evaluate on: a file or dataset, as agent.tasks of a training."""
    by: Names = Field(default_factory=list[str])
    """Fields of the tasks for whose values the accuracy is shown too."""
    fail_under: Share | None = None
    """Exit with 1 if the accuracy of an evaluated model is lower, for CI. Of several, base is not
    held to it."""


class TrainEvaluationSettings(EvaluationSettings):
    tasks: Path | None = None
    """Held-out tasks, a file or dataset as agent.tasks; never trained on."""
    every: Count = 5
    """Steps between evaluations; before the first and after the last too."""
    stop_at: Share | None = None
    """Stop once the held-out accuracy reaches this value."""
    patience: Count | None = None
    """Stop once so many evaluations in a row were no better than the best before them."""


class CheckSettings(Table):
    """The rollouts of ``agentrl check``."""

    tasks: Count = 4
    """Tasks to try: those of the first steps of a training with the same seed."""
    samples: Annotated[int, Field(ge=2)] = 8
    """Rollouts per task."""


class InspectSettings(Table):
    """A task of inspect_ai, which runs in a process of its own."""

    task: Annotated[str, Field(min_length=1)]
    """The task: FILE.py, FILE.py@NAME, or the name of an installed one."""
    command: str = "inspect"
    """Program of inspect_ai, which may have an environment of its own."""
    args: str = ""
    """More arguments of `inspect eval`: --inspect.args='--limit 100 --epochs 4 -T level=easy'."""
