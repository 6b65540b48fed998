"""Define the options of each loss, their defaults and their bounds. No torch here.

The tables of ``[algorithm]`` in a configuration file are these classes. Tinker's API has them flat:
``{"clip_high_threshold": 1.28, "kl_coef": 0.1}``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

LossConfig = Mapping[str, float | str]

NonNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
LowRatio = Annotated[float, Field(ge=0, le=1)]
HighRatio = Annotated[float, Field(ge=1)]


class Options(BaseModel):
    """The options of a part of a loss. This class itself serves a loss that has none."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class ClipOptions(Options):
    """Bounds of the importance ratio, absolute as in Tinker's API."""

    clip_low_threshold: LowRatio = 0.8
    """Lower bound of the ratio."""
    clip_high_threshold: HighRatio = 1.2
    """Upper bound of the ratio."""


class PpoOptions(ClipOptions):
    dual_clip_threshold: NonNegative = 0.0
    """Bound of the ratio of tokens with negative advantage; 3 is usual, 0 is off."""

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        dual, high = self.dual_clip_threshold, self.clip_high_threshold
        if 0 < dual <= high:
            raise ValueError(
                f"dual_clip_threshold: {dual} must exceed clip_high_threshold {high}; 3 is usual"
            )
        return self


class GspoOptions(ClipOptions):
    """The paper's bounds, of the ratio of a whole sequence (arXiv:2507.18071)."""

    clip_low_threshold: LowRatio = 1 - 0.0003
    """Lower bound of the ratio."""
    clip_high_threshold: HighRatio = 1 + 0.0004
    """Upper bound of the ratio."""


class DroOptions(Options):
    beta: NonNegative = 0.05
    """Weight of the squared log-ratio."""


class DppoOptions(Options):
    """Bounds of the change of a token's probability."""

    divergence: Literal["tv", "kl"] = "tv"
    """Total variation or KL, of the sampled token against all others."""
    divergence_low: Positive = 0.2
    """Bound on a falling probability with negative advantage."""
    divergence_high: Positive = 0.2
    """Bound on a rising probability with positive advantage."""


class KlOptions(Options):
    """The penalty on the KL divergence from a reference policy."""

    coef: NonNegative = 0.0
    """Weight of the KL to the reference; 0 is off."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator that is reported."""
    gradient: Literal["unbiased", "direct"] = "unbiased"
    """Gradient of the KL itself, or of its estimator as in GRPO."""


class CorrectionOptions(Options):
    """Importance weights for tokens that another policy sampled."""

    mode: Literal["none", "truncate", "mask"] = "none"
    """Beyond the bounds a weight is set to the bound, or to 0."""
    level: Literal["token", "sequence", "geometric"] = "token"
    """Weight of each token, or of its sequence (product or geometric mean)."""
    low: LowRatio = 0.0
    """Lower bound of the importance weight."""
    high: HighRatio = 2.0
    """Upper bound of the importance weight."""


OPTIONS_OF: dict[str, type[Options]] = {
    "cross_entropy": Options,
    "importance_sampling": Options,
    "ppo": PpoOptions,
    "cispo": ClipOptions,
    "dro": DroOptions,
    "gspo": GspoOptions,
    "dppo": DppoOptions,
}
"""By loss, the class of its own options."""


@dataclass(frozen=True, slots=True)
class LossOptions:
    """The options of a loss, and those that every loss has."""

    own: Options
    kl: KlOptions
    correction: CorrectionOptions


def flat_name(part: str, option: str) -> str:
    """Name an option in a flat configuration: ``clip_low_threshold``, ``kl_coef``, ``correction``
    for the correction's mode."""
    return option if part == "own" else f"{part}_{option}".removesuffix("_mode")


def parse_loss_options(loss: str, config: LossConfig) -> LossOptions:
    """Read a flat configuration.

    Raises:
        ValueError: the loss or an option is unknown, or a value is out of bounds.
    """
    if loss not in OPTIONS_OF:
        raise ValueError(f"unknown loss {loss!r}: choose one of {sorted(OPTIONS_OF)}")
    parts = {"own": OPTIONS_OF[loss], "kl": KlOptions, "correction": CorrectionOptions}
    known = {flat_name(part, name) for part, kind in parts.items() for name in kind.model_fields}
    if unknown := config.keys() - known:
        raise ValueError(f"unknown options of {loss}: {sorted(unknown)}; it takes {sorted(known)}")
    made: dict[str, Any] = {}
    for part, kind in parts.items():
        names = {name: flat_name(part, name) for name in kind.model_fields}
        given = {name: config[flat] for name, flat in names.items() if flat in config}
        try:
            made[part] = kind.model_validate(given, strict=True)
        except ValidationError as error:
            said = [
                ": ".join([*(names[str(name)] for name in e["loc"]), e["msg"]])
                for e in error.errors()
            ]
            raise ValueError(f"options of {loss}: {'; '.join(said)}") from None
    return LossOptions(**made)


@dataclass(frozen=True, slots=True)
class ValueParams:
    """How a value function learns."""

    lr: float  # above 0; higher than a LoRA's, because the value function starts from nothing
    clip: float  # how far a prediction may move in a step; 0: the plain squared error


@dataclass(frozen=True, slots=True)
class AdamParams:
    """AdamW's parameters, with Tinker's names and defaults."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0  # of each adapter's gradient; 0: off
