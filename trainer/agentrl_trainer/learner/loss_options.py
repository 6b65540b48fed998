"""Define the options of each loss, their defaults and their bounds. No torch here.

A configuration of a loss is flat, as in Tinker's API: ``{"clip_high_threshold": 1.28}``. It may set
the options of the loss itself, of the KL to a reference and of the off-policy correction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass

LossConfig = Mapping[str, float | str]

NonNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
LowRatio = Annotated[float, Field(ge=0, le=1)]
HighRatio = Annotated[float, Field(ge=1)]

_CHECKS = ConfigDict(strict=True, allow_inf_nan=False)


@checked_dataclass(frozen=True, slots=True, config=_CHECKS)
class LossOptions:
    """What every loss takes: the KL to a reference policy, and the correction, importance weights
    for tokens that another policy sampled."""

    kl_coef: NonNegative = 0.0  # the weight of the KL; 0: off
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"  # what is reported and added to the loss's value
    kl_gradient: Literal["unbiased", "direct"] = "unbiased"  # of the KL, or of its estimator
    correction: Literal["none", "truncate", "mask"] = "none"  # beyond the bounds: at them, or 0
    correction_level: Literal["token", "sequence", "geometric"] = "token"
    correction_low: LowRatio = 0.0
    correction_high: HighRatio = 2.0


@checked_dataclass(frozen=True, slots=True, config=_CHECKS)
class ClipOptions(LossOptions):
    """Bounds of the importance ratio, absolute as in Tinker's API."""

    clip_low_threshold: LowRatio = 0.8
    clip_high_threshold: HighRatio = 1.2


@checked_dataclass(frozen=True, slots=True, config=_CHECKS)
class PpoOptions(ClipOptions):
    dual_clip_threshold: float = 0.0  # bounds the ratio of tokens with negative advantage; 0: off

    def __post_init__(self) -> None:
        if self.dual_clip_threshold and self.dual_clip_threshold <= self.clip_high_threshold:
            raise ValueError(
                f"dual_clip_threshold {self.dual_clip_threshold} must exceed clip_high_threshold "
                f"{self.clip_high_threshold}, or be 0 (off); 3 is usual"
            )


@checked_dataclass(frozen=True, slots=True, config=_CHECKS)
class GspoOptions(ClipOptions):
    """The paper's bounds, of the ratio of a whole sequence."""

    clip_low_threshold: LowRatio = 1 - 3e-4
    clip_high_threshold: HighRatio = 1 + 4e-4


@checked_dataclass(frozen=True, slots=True, config=_CHECKS)
class DroOptions(LossOptions):
    beta: NonNegative = 0.05  # weight of the squared log-ratio


@checked_dataclass(frozen=True, slots=True, config=_CHECKS)
class DppoOptions(LossOptions):
    """Bounds of the change of a token's probability."""

    divergence: Literal["tv", "kl"] = "tv"  # total variation or KL, against all other tokens
    divergence_low: Positive = 0.2  # of tokens with negative advantage
    divergence_high: Positive = 0.2  # of tokens with positive advantage


OPTIONS_OF: dict[str, type[LossOptions]] = {
    "cross_entropy": LossOptions,
    "importance_sampling": LossOptions,
    "ppo": PpoOptions,
    "cispo": ClipOptions,
    "dro": DroOptions,
    "gspo": GspoOptions,
    "dppo": DppoOptions,
}
"""By loss, the class of its options."""


def parse_loss_options(loss: str, config: LossConfig) -> LossOptions:
    """Read a flat configuration.

    Raises:
        ValueError: the loss or an option is unknown, or a value is out of bounds.
    """
    if loss not in OPTIONS_OF:
        raise ValueError(f"unknown loss {loss!r}: choose one of {sorted(OPTIONS_OF)}")
    kind: Any = OPTIONS_OF[loss]
    known = {field.name for field in fields(kind)}
    if unknown := config.keys() - known:
        raise ValueError(f"unknown options of {loss}: {sorted(unknown)}; it takes {sorted(known)}")
    try:
        return kind(**config)
    except ValidationError as error:
        said = "; ".join(": ".join(map(str, (*e["loc"], e["msg"]))) for e in error.errors())
        raise ValueError(f"options of {loss}: {said}") from None


@checked_dataclass(frozen=True, slots=True, config=_CHECKS)
class ValueParams:
    """How a value function learns."""

    lr: Positive = 1e-3  # higher than of a LoRA, because it starts from nothing
    clip: NonNegative = 0.2  # how far a prediction may move in a step; 0: the plain squared error


@dataclass(frozen=True, slots=True)
class AdamParams:
    """AdamW's parameters, with Tinker's names and defaults."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0  # of each adapter's gradient; 0: off
