"""A step in numbers: one row of ``metrics.jsonl``, of the store and of the trackers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.runs.metric_names import DIFFERENCE, LAST_EPOCH, OPTIONAL
from agentrl.training.rollout_queue import StepRollouts, seconds_of_running, staleness_metrics
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
    seconds: Mapping[str, float],
    learning_rate: float,
    max_staleness: int,
) -> dict[str, Any]:
    """Of several adapters, each one's numbers are there under its name as well.

    What each number is, docs/metrics.md says.

    Args:
        passes: what each adapter's epochs saw; none: there was nothing to learn from.
        seconds: wall-clock time of ``rollouts``, ``update`` and whatever else was measured.
    """
    batch = batches.whole()
    sampled = sum(len(call.response_ids) for call in calls)
    running = seconds_of_running(taken.rollouts)
    row: dict[str, Any] = {
        "step": step,
        **batch.metrics(),
        **outcomes.metrics(),
        "calls": len(calls),
        "calls/trained": len(batch.trained),
        "tokens/sampled": sampled,
        # Not by the time that this step waited: it may have run while earlier steps learned.
        "tokens_per_second": sampled / running if running else 0.0,
        **staleness_metrics(
            [
                step - 1 - version
                for call in calls
                if call.id in batch.trained
                for version in token_versions(call)
            ],
            max_staleness=max_staleness,
            taken=taken,
        ),
        DIFFERENCE: max(
            (epochs[0].max_logprob_difference for epochs in passes.values() if epochs), default=0.0
        ),
        "learning_rate": learning_rate,
        **seconds_row(seconds),
    }
    for name, epochs in passes.items():
        prefix = "" if len(passes) == 1 else f"{name}/"
        if prefix:
            part = batches.by_adapter[name]
            row |= {prefix + key: value for key, value in part.metrics().items()}
            row[prefix + "calls/trained"] = len(part.trained)
        row |= {prefix + key: value for key, value in _update_metrics(epochs).items()}
    return row


def seconds_row(spent: Mapping[str, float]) -> dict[str, float]:
    """Wall-clock time as metrics."""
    return {f"seconds/{name}": seconds for name, seconds in spent.items()}


def _update_metrics(epochs: Sequence[StepStats]) -> dict[str, Any]:
    """An adapter's update in numbers; nothing where there was none."""
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
    """What changes from epoch to epoch, as the policy moves."""
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
    """What a database column takes: numbers, and no NaN."""
    return {
        name: float(value)
        for name, value in row.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }
