"""Compute a step's row of metrics; docs/metrics.md says what each number means."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.runs.metric_names import DIFFERENCE, LAST_EPOCH, OPTIONAL
from agentrl.timing import PhaseTimer
from agentrl.training.rollout_queue import StepRollouts, seconds_of_running
from agentrl.training.staleness import StalenessLimit
from agentrl_tracer.schemas import Call, Outcomes
from agentrl_trainer.data.adapter_split import AdapterBatches
from agentrl_trainer.data.off_policy import token_versions
from agentrl_trainer.learner.step_stats import StepStats


def step_row(
    step: int,
    *,
    taken: StepRollouts,
    calls: Sequence[Call],
    batches: AdapterBatches,
    passes: Mapping[str, Sequence[StepStats]],
    outcomes: Outcomes,
    learning_rate: float,
    staleness: StalenessLimit,
) -> dict[str, Any]:
    """Return the step's metrics; with several adapters, each one's again under its name.

    Args:
        passes: statistics of each adapter's epochs; empty where there was nothing to learn from.
    """
    batch = batches.whole()
    sampled = sum(len(call.response_ids) for call in calls)
    running = seconds_of_running(taken.rollouts)
    ages = [
        step - 1 - version
        for call in calls
        if call.id in batch.trained
        for version in token_versions(call)
    ]
    differences = [epochs[0].max_logprob_difference for epochs in passes.values() if epochs]
    row: dict[str, Any] = {
        "step": step,
        **batch.metrics(),
        **outcomes.metrics(),
        "calls": len(calls),
        "calls/trained": len(batch.trained),
        "tokens/sampled": sampled,
        # By when the rollouts ran, not by how long this step waited for them.
        "tokens_per_second": sampled / running if running else 0.0,
        **staleness.metrics(ages),
        **taken.metrics(),
        DIFFERENCE: max(differences, default=0.0),
        "learning_rate": learning_rate,
    }
    for name, epochs in passes.items():
        own = _update_metrics(epochs)
        if len(passes) > 1:
            part = batches.by_adapter[name]
            own = {**part.metrics(), "calls/trained": len(part.trained), **own}
            own = {f"{name}/{key}": value for key, value in own.items()}
        row |= own
    return row


def seconds_row(timer: PhaseTimer) -> dict[str, float]:
    return {f"seconds/{phase}": seconds for phase, seconds in timer.spent.items()}


def _update_metrics(epochs: Sequence[StepStats]) -> dict[str, Any]:
    """Return the metrics of an adapter's update; nothing without one."""
    if not epochs:
        return {}
    first, last = epochs[0], epochs[-1]
    row = {
        "tokens/trained": first.tokens,
        "tokens/total": first.tokens_total,
        "tokens/unique": first.tokens_unique,
        "tokens/saved_by_sharing": first.tokens_saved,
        "sampler_trainer/mean_logprob_difference": first.mean_logprob_difference,
        "step_refused": float(last.skipped_non_finite),
        **_policy_metrics(first),
    }
    if len(epochs) > 1:
        row |= {LAST_EPOCH + name: value for name, value in _policy_metrics(last).items()}
    return row


def _policy_metrics(stats: StepStats) -> dict[str, Any]:
    """Return what changes from epoch to epoch, as the policy moves."""
    return {
        "loss": stats.loss,
        "entropy": stats.entropy,
        "ratio/mean": stats.ratio_mean,
        "ratio/max": stats.ratio_max,
        "clip_fraction": stats.clip_fraction,
        "sampler_trainer/kl": stats.sampler_trainer_kl,
        "grad_norm": stats.grad_norm,
        **{OPTIONAL[name]: value for name, value in stats.metrics.items()},
    }


def finite_numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """Keep the numbers of a row, without NaN and infinities."""
    return {
        name: float(value)
        for name, value in row.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }
