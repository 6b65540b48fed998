"""Define what the learner reports of a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentrl_trainer.data.packing import TokenCounts
    from agentrl_trainer.learner.losses import Sums


@dataclass(frozen=True, slots=True)
class StepStats:
    """What one ``forward_backward`` saw, with the policy as it was *before* the update.

    ``sampler_trainer_kl`` and the differences compare the trainer's log-probs with the sampler's.
    On tokens sampled by the current version they measure the disagreement of the two engines and
    should be near zero; on older tokens they measure how far the policy has moved.
    """

    loss: float  # summed, divided by ``normalize_by``
    tokens: int  # trained ones
    entropy: float  # estimate: minus the mean log-prob of the sampled tokens
    ratio_mean: float
    ratio_max: float
    clip_fraction: float
    sampler_trainer_kl: float  # k3 estimate of KL(sampler || trainer), per token
    mean_logprob_difference: float  # absolute
    max_logprob_difference: float  # absolute
    tokens_total: int  # of all rows, context included, each row by itself
    tokens_unique: int  # prefixes that rows share counted once
    tokens_saved: int  # of the total, those that did not go through the model, thanks to sharing
    tokens_recomputed: int = 0  # through the model a second time, for a backward in bounded memory
    skipped_non_finite: bool = False
    grad_norm: float | None = None  # known once the optimizer has stepped
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """Means per token that not every step has: ``kl_reference``, ``correction`` (the weight),
    ``dropped`` (fraction that the correction cut), ``value_loss``, ``value_error`` (absolute)."""


@dataclass(frozen=True, slots=True)
class OptimStats:
    grad_norm: float  # over all adapters, before clipping
    skipped_non_finite: bool


_OPTIONAL = ("kl_reference", "correction", "dropped", "value_loss", "value_error")


def step_stats(loss: float, sums: Sums, counts: TokenCounts, *, non_finite: bool) -> StepStats:
    """Summarize a loss's sums over all tokens."""
    values = defaultdict(float, {name: float(value) for name, value in sums.items()})
    tokens = max(values["tokens"], 1.0)
    return StepStats(
        loss=loss,
        tokens=int(values["tokens"]),
        entropy=-values["logprob"] / tokens,
        ratio_mean=values["ratio"] / tokens,
        ratio_max=values["ratio_max"],
        clip_fraction=values["clipped"] / tokens,
        sampler_trainer_kl=values["kl_k3"] / tokens,
        mean_logprob_difference=values["difference"] / tokens,
        max_logprob_difference=values["difference_max"],
        tokens_total=counts.total,
        tokens_unique=counts.unique,
        tokens_saved=counts.saved,
        tokens_recomputed=counts.recomputed,
        skipped_non_finite=non_finite,
        metrics={name: values[name] / tokens for name in _OPTIONAL if name in values},
    )


def merged(parts: Sequence[StepStats]) -> StepStats:
    """Return the stats of all rows, of which each part saw some.

    ``tokens_unique`` is the sum of the parts', in which a prefix that parts share is counted twice.
    """

    def total(name: str) -> Any:
        return sum(getattr(part, name) for part in parts)

    def mean(values: Iterable[float]) -> float:
        both = zip(parts, values, strict=True)
        return sum(part.tokens * value for part, value in both) / max(total("tokens"), 1)

    sums = ("loss", "tokens", "tokens_total", "tokens_unique", "tokens_saved", "tokens_recomputed")
    means = (
        "entropy", "ratio_mean", "clip_fraction", "sampler_trainer_kl", "mean_logprob_difference",
    )  # fmt: skip
    largest = ("ratio_max", "max_logprob_difference", "skipped_non_finite")
    return StepStats(
        **{name: total(name) for name in sums},
        **{name: mean(getattr(part, name) for part in parts) for name in means},
        **{name: max(getattr(part, name) for part in parts) for name in largest},
        metrics={
            name: mean(part.metrics.get(name, 0.0) for part in parts)
            for name in _OPTIONAL
            if any(name in part.metrics for part in parts)
        },
    )
