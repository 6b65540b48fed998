"""The settings around a training: its evaluations, what may end it early, and sweeps of it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from agentrl.config.field_types import Count, Positive, Share, Table, Whole, from_json
from agentrl.config.settings import EvaluationSettings


class TrainEvaluationSettings(EvaluationSettings):
    tasks: Path | None = None
    """Held-out tasks (JSON lines); never trained on."""
    every: Count = 5
    """Steps between evaluations; before the first and after the last too."""
    stop_at: Share | None = None
    """Stop once the held-out accuracy reaches this value."""
    patience: Count | None = None
    """Stop once so many evaluations in a row were no better than the best before them."""


class GuardSettings(Table):
    """Limits of a run, and what follows when it collapses. ``evaluation`` has those of success."""

    max_hours: Positive | None = None
    """Hours that the run may take, those before a --resume included. It ends before a step that
    would not fit."""
    max_run_tokens: Count | None = None
    """Tokens that the models in training may read and sample in the run, evaluations included. The
    run ends before a step that would not fit."""
    max_cost: Positive | None = None
    """US dollars that the calls of other models may cost, by LiteLLM's price table. The run ends
    before a step that would not fit."""
    on_collapse: Literal["note", "stop", "roll_back"] = "note"
    """When an alert says that the run collapses: show it; stop; or go back to the step with the
    best held-out accuracy and go on with half the learning rate."""
    roll_backs: Whole = 2
    """With roll_back: how often; the next collapse stops the run."""


class SweepSettings(Table):
    """A search for the best values of settings: its trials are training runs."""

    space: Annotated[dict[str, Any], BeforeValidator(from_json), Field(min_length=1)]
    """Settings to search, by their names in the file: a list of values, or { low = 1e-4, high =
    1e-2, log = true }; step = 2 makes it a range of steps."""
    trials: Count = 20
    """Trials of the sweep, the failed ones included."""
    parallel: Count = 1
    """Trials that run at the same time; they share the CPU cores."""
    ray: Annotated[dict[str, Positive], BeforeValidator(from_json)] | None = None
    """Run each trial as a job of a Ray cluster, with these resources: { CPU = 4, GPU = 1 }. By
    default trials run on this machine."""
    metric: Annotated[str, Field(min_length=1)] = "eval/accuracy"
    """The metric to optimize, as its last value in a run; docs/metrics.md lists them."""
    direction: Literal["maximize", "minimize"] = "maximize"
    """Whether more of the metric is better, or less."""
    sampler: Literal["tpe", "grid", "random", "gp", "cmaes"] = "tpe"
    """What chooses the values: Optuna's sampler of that name. grid needs a list for each
    setting."""
    pruner: Literal["none", "asha", "median"] = "none"
    """What stops hopeless trials early, by the metric's values so far: asha keeps the best third at
    each rung of steps, median stops what is worse than the median of earlier trials."""
    seeds: Count = 1
    """Runs of each trial, one after another with seeds from run.seed on. A trial's value is their
    mean; the pruner looks at the first."""
