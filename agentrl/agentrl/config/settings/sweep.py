"""A search for the best values of settings."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from agentrl.config.field_types import Count, Positive, Table, from_json


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
