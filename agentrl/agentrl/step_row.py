"""A step in numbers: one row of ``metrics.jsonl``, of the store and of the trackers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.metrics import DIFFERENCE, OPTIONAL
from agentrl.rollout_stream import StepRollouts, staleness_metrics
from agentrl_tracer.schemas import Call, Outcomes
from agentrl_trainer.adapters import AdapterBatches
from agentrl_trainer.learner import StepStats
from agentrl_trainer.trajectories import token_versions


def step_row(
    step: int,
    *,
    taken: StepRollouts,
    calls: Sequence[Call],
    batches: AdapterBatches,
    stats: Mapping[str, StepStats | None],
    outcomes: Outcomes,
    seconds: Mapping[str, float],
    learning_rate: float,
    max_staleness: int,
) -> dict[str, Any]:
    """Of several adapters, each one's numbers are there under its name as well.

    Args:
        stats: each adapter's first pass; None: there was nothing to learn from.
        seconds: wall-clock time of ``rollouts`` and ``update``.
    """
    batch = batches.whole()
    sampled = sum(len(call.response_ids) for call in calls)
    row: dict[str, Any] = {
        "step": step,
        **batch.metrics(),
        **outcomes.metrics(),
        "calls": len(calls),
        "calls/trained": len(batch.trained),
        "tokens/sampled": sampled,
        # Where rollouts ran while the step before learned, that time counts as well.
        "tokens_per_second": sampled / (seconds["rollouts"] + taken.overlapped),
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
        DIFFERENCE: max((s.max_logprob_difference for s in stats.values() if s), default=0.0),
        "seconds/rollouts": seconds["rollouts"],
        "seconds/update": seconds["update"],
        "learning_rate": learning_rate,
    }
    for name, one in stats.items():
        prefix = "" if len(stats) == 1 else f"{name}/"
        if prefix:
            part = batches.by_adapter[name]
            row |= {prefix + key: value for key, value in part.metrics().items()}
            row[prefix + "calls/trained"] = len(part.trained)
        row |= {prefix + key: value for key, value in _update_metrics(one).items()}
    return row


def _update_metrics(stats: StepStats | None) -> dict[str, Any]:
    """An adapter's update in numbers; nothing where there was none."""
    if stats is None:
        return {}
    return {
        "tokens/trained": stats.tokens,
        "tokens/total": stats.tokens_total,
        "tokens/unique": stats.tokens_unique,
        "tokens/saved_by_sharing": stats.tokens_saved,
        "loss": stats.loss,
        "entropy": stats.entropy,
        "ratio/mean": stats.ratio_mean,
        "ratio/max": stats.ratio_max,
        "clip_fraction": stats.clip_fraction,
        "sampler_trainer/kl": stats.sampler_trainer_kl,
        "sampler_trainer/mean_logprob_difference": stats.mean_logprob_difference,
        "grad_norm": stats.grad_norm,
        "step_refused": float(stats.skipped_non_finite),
        **{OPTIONAL[name]: value for name, value in stats.metrics.items()},
    }


def finite_numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """What a database column takes: numbers, and no NaN."""
    return {
        name: float(value)
        for name, value in row.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }
