"""Define the options of each loss, their defaults and their bounds. No torch here.

A configuration of a loss is flat, as in Tinker's API: ``{"clip_high_threshold": 1.28}``. It may set
the options of the loss itself, of the KL to a reference and of the off-policy correction.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_type_hints

LossConfig = Mapping[str, float | str]
LossName = Literal[
    "cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo", "dppo"
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class NoOptions:
    """The loss has no options of its own."""


@dataclass(frozen=True, slots=True)
class ClipOptions:
    """Bounds of the importance ratio, absolute as in Tinker's API."""

    clip_low_threshold: float = 0.8
    clip_high_threshold: float = 1.2

    def __post_init__(self) -> None:
        _check(self)
        _check_ratios("clip thresholds", self.clip_low_threshold, self.clip_high_threshold)


@dataclass(frozen=True, slots=True)
class PpoOptions(ClipOptions):
    dual_clip_threshold: float = 0.0  # bounds the ratio of tokens with negative advantage; 0: off

    def __post_init__(self) -> None:
        ClipOptions.__post_init__(self)
        if self.dual_clip_threshold and self.dual_clip_threshold <= self.clip_high_threshold:
            raise ValueError(
                f"dual_clip_threshold {self.dual_clip_threshold} must exceed clip_high_threshold "
                f"{self.clip_high_threshold}, or be 0 (off); 3 is usual"
            )


@dataclass(frozen=True, slots=True)
class GspoOptions(ClipOptions):
    """The paper's bounds, of the ratio of a whole sequence."""

    clip_low_threshold: float = 1 - 3e-4
    clip_high_threshold: float = 1 + 4e-4


@dataclass(frozen=True, slots=True)
class DroOptions:
    beta: float = 0.05  # weight of the squared log-ratio

    def __post_init__(self) -> None:
        _check(self)
        if self.beta < 0:
            raise ValueError(f"beta must not be negative, got {self.beta}")


@dataclass(frozen=True, slots=True)
class DppoOptions:
    """Bounds of the change of a token's probability."""

    divergence: Literal["tv", "kl"] = "tv"  # total variation or KL, against all other tokens
    divergence_low: float = 0.2  # of tokens with negative advantage
    divergence_high: float = 0.2  # of tokens with positive advantage

    def __post_init__(self) -> None:
        _check(self)
        low, high = self.divergence_low, self.divergence_high
        if low <= 0 or high <= 0:
            raise ValueError(f"divergence_low and divergence_high must be positive: {low}, {high}")


@dataclass(frozen=True, slots=True)
class KlOptions:
    """The KL to a reference policy, which any loss may add."""

    kl_coef: float = 0.0  # its weight; 0: off
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"  # what is reported and added to the loss's value
    kl_gradient: Literal["unbiased", "direct"] = "unbiased"  # of the KL, or of its estimator

    def __post_init__(self) -> None:
        _check(self)
        if self.kl_coef < 0:
            raise ValueError("kl_coef must not be negative: it would push away from the reference")


@dataclass(frozen=True, slots=True)
class CorrectionOptions:
    """Importance weights for tokens that another policy sampled, which any loss may apply."""

    correction: Literal["none", "truncate", "mask"] = "none"  # beyond the bounds: at them, or 0
    correction_level: Literal["token", "sequence", "geometric"] = "token"
    correction_low: float = 0.0
    correction_high: float = 2.0

    def __post_init__(self) -> None:
        _check(self)
        _check_ratios("correction bounds", self.correction_low, self.correction_high)


OPTIONS_OF: dict[str, type[Any]] = {
    "cross_entropy": NoOptions,
    "importance_sampling": NoOptions,
    "ppo": PpoOptions,
    "cispo": ClipOptions,
    "dro": DroOptions,
    "gspo": GspoOptions,
    "dppo": DppoOptions,
}
"""By loss, the class of the options that belong to it alone."""


@dataclass(frozen=True, slots=True)
class LossOptions:
    """All options of one loss."""

    own: Any  # of the loss's class in OPTIONS_OF
    kl: KlOptions
    correction: CorrectionOptions


def parse_loss_options(loss: str, config: LossConfig) -> LossOptions:
    """Read a flat configuration.

    Raises:
        ValueError: the loss or an option is unknown, or a value is out of bounds.
    """
    if loss not in OPTIONS_OF:
        raise ValueError(f"unknown loss {loss!r}: choose one of {sorted(OPTIONS_OF)}")
    kinds: tuple[type[Any], ...] = (OPTIONS_OF[loss], KlOptions, CorrectionOptions)
    known = [[field.name for field in fields(kind)] for kind in kinds]
    if unknown := set(config).difference(*known):
        takes = sorted(set[str]().union(*known))
        raise ValueError(f"unknown options of {loss}: {sorted(unknown)}; it takes {takes}")
    given: list[dict[str, Any]] = [
        {name: config[name] for name in names if name in config} for names in known
    ]
    return LossOptions(
        OPTIONS_OF[loss](**given[0]), KlOptions(**given[1]), CorrectionOptions(**given[2])
    )


def _check(options: Any) -> None:
    """Refuse values that are no choice of their field, or no finite number."""
    for name, choices in _choices(type(options)).items():
        value = getattr(options, name)
        if choices and value not in choices:
            raise ValueError(f"{name} must be one of {list(choices)}, not {value!r}")
        if not choices and (isinstance(value, str) or not math.isfinite(value)):
            raise ValueError(f"{name} must be a finite number, not {value!r}")


def _check_ratios(what: str, low: float, high: float) -> None:
    if not 0 <= low <= 1 <= high:
        raise ValueError(f"{what} are ratios, low <= 1 <= high; got {low} and {high}")


@functools.cache
def _choices(kind: type[Any]) -> dict[str, tuple[str, ...]]:
    return {name: get_args(hint) for name, hint in get_type_hints(kind).items()}


# ---- options beside the loss


@dataclass(frozen=True, slots=True)
class ValueParams:
    """How a value function learns."""

    lr: float = 1e-3  # higher than of a LoRA, because it starts from nothing
    clip: float = 0.2  # how far a prediction may move in a step; 0: the plain squared error

    def __post_init__(self) -> None:
        if self.lr <= 0 or self.clip < 0:
            raise ValueError(f"lr must be positive and clip not negative: {self}")


@dataclass(frozen=True, slots=True)
class AdamParams:
    """AdamW's parameters, with Tinker's names and defaults."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0  # of each adapter's gradient; 0: off
