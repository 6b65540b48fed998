"""Options of the losses and estimators, of the KL penalty and of the correction: a table for each.

``AlgorithmSettings`` holds them all; an estimator or loss that is not chosen has no options.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from agentrl.config.fields import NonNegative, Positive, Share, Table

RewardLoss = Literal["importance_sampling", "ppo", "cispo", "dro", "gspo", "dppo"]
Estimator = Literal[
    "grpo", "dr_grpo", "rloo", "reinforce++", "maxrl", "reinforce", "turn", "gigpo", "gae"
]


class ClipSettings(Table):
    clip_low_threshold: Share = 0.8
    """Lower bound of the ratio."""
    clip_high_threshold: Annotated[float, Field(ge=1)] = 1.2
    """Upper bound of the ratio."""


class PpoSettings(ClipSettings):
    dual_clip_threshold: Annotated[float, Field(gt=1)] | None = None
    """Bound of the ratio of tokens with negative advantage; 3 is usual."""


class GspoSettings(ClipSettings):
    clip_low_threshold: Share = 1 - 0.0003
    """Lower bound of the ratio."""
    clip_high_threshold: Annotated[float, Field(ge=1)] = 1 + 0.0004
    """Upper bound of the ratio."""


class DroSettings(Table):
    beta: NonNegative = 0.05
    """Weight of the squared log-ratio."""


class DppoSettings(Table):
    divergence: Literal["tv", "kl"] = "tv"
    """Total variation or KL, of the sampled token against all others."""
    divergence_low: Positive = 0.2
    """Bound on a falling probability with negative advantage."""
    divergence_high: Positive = 0.2
    """Bound on a rising probability with positive advantage."""


class DeviationSettings(Table):
    std_ddof: Literal[0, 1] = 1
    """The standard deviation divides by n - ddof."""
    std_epsilon: NonNegative = 1e-06
    """Added to the standard deviation."""


class GroupSettings(DeviationSettings):
    normalize_std: bool = False
    """Divide advantages by the group's standard deviation."""


class TurnSettings(GroupSettings):
    discount: Share = 1.0
    """Discount of later rewards, by turn."""


class GigpoSettings(TurnSettings):
    step_weight: NonNegative = 1.0
    """Weight of the comparison of equal states."""


class GaeSettings(DeviationSettings):
    normalize_std: bool = False
    """Center and scale advantages over the tokens of the step."""
    discount: Share = 1.0
    """Discount of later rewards, by token."""
    gae_lambda: Share = 0.95
    """0 relies on the value function, 1 on the rewards."""
    value_lr: Positive = 0.001
    """Learning rate of the value function."""
    value_clip: NonNegative = 0.2
    """How far a prediction may move in a step; 0 is off."""


class KlSettings(Table):
    """The penalty on the KL divergence from a reference policy."""

    coef: NonNegative = 0.0
    """Weight of the KL to the reference; 0 is off."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator that is reported."""
    gradient: Literal["unbiased", "direct"] = "unbiased"
    """Gradient of the KL itself, or of its estimator as in GRPO."""
    reference: Path | None = None
    """PEFT folder of the reference adapter; by default the base model."""


class CorrectionSettings(Table):
    """Importance weights for tokens that another policy sampled."""

    mode: Literal["none", "truncate", "mask"] | None = None
    """By default none; truncate with a max_staleness, unless stale is drop."""
    level: Literal["token", "sequence", "geometric"] = "token"
    """Weight of each token, or of its sequence (product or geometric mean)."""
    low: Share = 0.0
    """Lower bound of the importance weight."""
    high: Annotated[float, Field(ge=1)] = 2.0
    """Upper bound of the importance weight."""
