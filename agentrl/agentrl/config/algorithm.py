"""What ``agentrl train`` may be told about advantages and losses, and what goes with what.

Typed settings and their checks; no torch here.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self

from cyclopts import Group, Parameter
from pydantic import BaseModel, ConfigDict, Field, model_validator

if TYPE_CHECKING:
    from agentrl_trainer.data.advantages import Scaling
    from agentrl_trainer.data.batch_assembly import StepSettings
    from agentrl_trainer.learner.loss_options import ValueParams
    from agentrl_trainer.learner.prepare_batch import UpdateSettings

_GROUP = Group("Algorithm", sort_key=3.5)
REFERENCE = "kl-reference"  # the name of the reference adapter inside the learner

LOSS_OPTIONS: dict[str, tuple[str, ...]] = {
    "importance_sampling": (),
    "ppo": ("clip_low_threshold", "clip_high_threshold", "dual_clip_threshold"),
    "cispo": ("clip_low_threshold", "clip_high_threshold"),
    "dro": ("beta",),
    "gspo": ("clip_low_threshold", "clip_high_threshold"),
    "dppo": ("divergence", "divergence_low", "divergence_high"),
}
"""By loss, the settings that belong to it alone."""

_SHARED_OPTIONS = (
    "kl_coef", "kl_estimator", "kl_gradient",
    "correction", "correction_level", "correction_low", "correction_high",
)  # fmt: skip
_NEEDS: tuple[tuple[str, str, tuple[object, ...], str], ...] = (
    # a setting, what it depends on, the values it needs there, in words
    ("kl_estimator", "kl_coef", (), "a kl_coef above 0"),
    ("kl_gradient", "kl_coef", (), "a kl_coef above 0"),
    ("kl_reference", "kl_coef", (), "a kl_coef above 0"),
    ("correction_level", "correction", ("truncate", "mask"), "correction truncate or mask"),
    ("correction_low", "correction", ("truncate", "mask"), "correction truncate or mask"),
    ("correction_high", "correction", ("truncate", "mask"), "correction truncate or mask"),
    ("std_ddof", "estimator", (), "normalize_std, or estimator reinforce++"),
    ("std_epsilon", "estimator", (), "normalize_std, or estimator reinforce++"),
    ("discount", "estimator", ("turn", "gigpo", "gae"), "estimator turn, gigpo or gae"),
    ("step_weight", "estimator", ("gigpo",), "estimator gigpo"),
    ("gae_lambda", "estimator", ("gae",), "estimator gae"),
    ("value_lr", "estimator", ("gae",), "estimator gae"),
    ("value_clip", "estimator", ("gae",), "estimator gae"),
    ("length_constant", "length_normalization", ("constant",), "length_normalization constant"),
)
_SCALABLE = ("grpo", "rloo", "turn", "gigpo", "gae")


@Parameter(name="*")
class AlgorithmConfig(BaseModel):
    """Advantages and losses."""

    model_config = ConfigDict(extra="forbid", validate_default=True)

    loss: Annotated[
        Literal["importance_sampling", "ppo", "cispo", "dro", "gspo", "dppo"],
        Parameter(group=_GROUP),
    ] = Field("importance_sampling", description="Loss, with Tinker's semantics.")
    clip_low_threshold: Annotated[float | None, Parameter(group=_GROUP)] = Field(
        None, ge=0, le=1, description="Lower bound of the ratio; by default the loss's own."
    )
    clip_high_threshold: Annotated[float | None, Parameter(group=_GROUP)] = Field(
        None, ge=1, description="Upper bound of the ratio; by default the loss's own."
    )
    dual_clip_threshold: Annotated[float | None, Parameter(group=_GROUP)] = Field(
        None, gt=1, description="For ppo: bounds the ratio of tokens with negative advantage."
    )
    beta: Annotated[float | None, Parameter(group=_GROUP)] = Field(
        None, ge=0, description="For dro: weight of the square of the log-ratio."
    )
    divergence: Annotated[Literal["tv", "kl"] | None, Parameter(group=_GROUP)] = Field(
        None, description="For dppo: total variation or KL, of the sampled token against the rest."
    )
    divergence_low: Annotated[float | None, Parameter(group=_GROUP)] = Field(
        None, gt=0, description="For dppo: how far a bad token's probability may fall."
    )
    divergence_high: Annotated[float | None, Parameter(group=_GROUP)] = Field(
        None, gt=0, description="For dppo: how far a good token's probability may rise."
    )
    kl_coef: Annotated[float, Parameter(group=_GROUP)] = Field(
        0.0, ge=0, description="Weight of the KL to the reference policy; 0 is off."
    )
    kl_estimator: Annotated[Literal["k1", "k2", "k3"] | None, Parameter(group=_GROUP)] = Field(
        None, description="Estimator of that KL which is reported; by default k3."
    )
    kl_gradient: Annotated[Literal["unbiased", "direct"] | None, Parameter(group=_GROUP)] = Field(
        None, description="Gradient of the KL itself (default), or of its estimator as in GRPO."
    )
    kl_reference: Annotated[Path | None, Parameter(group=_GROUP)] = Field(
        None, description="PEFT folder of the reference adapter; by default the base model."
    )
    correction: Annotated[Literal["none", "truncate", "mask"] | None, Parameter(group=_GROUP)] = (
        Field(
            None,
            description="Importance weights for what another policy sampled: by default none, and "
            "truncate with a max_staleness (unless stale is drop).",
        )
    )
    correction_level: Annotated[
        Literal["token", "sequence", "geometric"] | None, Parameter(group=_GROUP)
    ] = Field(None, description="Whose importance weight: the token's (default) or its sequence's.")
    correction_low: Annotated[float | None, Parameter(group=_GROUP)] = Field(
        None, ge=0, le=1, description="Lower bound of the importance weight; by default 0."
    )
    correction_high: Annotated[float | None, Parameter(group=_GROUP)] = Field(
        None, ge=1, description="Upper bound of the importance weight; by default 2."
    )
    estimator: Annotated[
        Literal[
            "grpo", "dr_grpo", "rloo", "reinforce++", "maxrl", "reinforce", "turn", "gigpo", "gae"
        ],
        Parameter(group=_GROUP),
    ] = Field("grpo", description="How rewards become advantages.")
    normalize_std: Annotated[bool, Parameter(group=_GROUP)] = Field(
        False,
        description="Divide advantages by the group's standard deviation (of gae: centre and scale "
        "them over the tokens of the step).",
    )
    std_ddof: Annotated[Literal[0, 1] | None, Parameter(group=_GROUP)] = Field(
        None, description="That deviation divides by n - ddof; by default 1."
    )
    std_epsilon: Annotated[float | None, Parameter(group=_GROUP)] = Field(
        None, ge=0, description="Added to that deviation; by default 1e-6."
    )
    discount: Annotated[float | None, Parameter(group=_GROUP)] = Field(
        None, ge=0, le=1, description="Of later rewards, by turn (turn, gigpo) or token (gae); 1."
    )
    step_weight: Annotated[float | None, Parameter(group=_GROUP)] = Field(
        None, ge=0, description="For gigpo: weight of the comparison of equal states; 1."
    )
    gae_lambda: Annotated[float | None, Parameter(group=_GROUP)] = Field(
        None, ge=0, le=1, description="For gae: 0 trusts the value function, 1 the rewards; 0.95."
    )
    value_lr: Annotated[float | None, Parameter(group=_GROUP)] = Field(
        None, gt=0, description="For gae: learning rate of the value function; 1e-3."
    )
    value_clip: Annotated[float | None, Parameter(group=_GROUP)] = Field(
        None, ge=0, description="For gae: how far a prediction may move in a step; 0.2, 0 is off."
    )
    length_normalization: Annotated[
        Literal["token", "sequence", "rollout", "constant"] | None, Parameter(group=_GROUP)
    ] = Field(
        None,
        description="What the loss is a mean over: all tokens of the step (default), sequences, "
        "rollouts, or a constant number of tokens (default of dr_grpo).",
    )
    length_constant: Annotated[int | None, Parameter(group=_GROUP)] = Field(
        None, ge=1, description="That constant number of tokens; by default max_tokens."
    )
    truncated: Annotated[Literal["train", "skip"], Parameter(group=_GROUP)] = Field(
        "train", description="Answers cut off at their token limit: train on them, or skip them."
    )
    off_policy: Annotated[Literal["train", "weight", "skip"], Parameter(group=_GROUP)] = Field(
        "train",
        description="Answers sampled greedily, with top-p, top-k, a bias or a grammar: train on "
        "them as they are, weight those whose weight is known, or skip them.",
    )
    skip_agents: Annotated[list[str], Parameter(group=_GROUP)] = Field(
        default_factory=list[str],
        description="Agents whose calls never train, such as title or summar* (patterns).",
    )

    @model_validator(mode="after")
    def _algorithm_makes_sense(self) -> Self:
        _check_loss(self)
        _check_dependencies(self)
        if self.normalize_std and self.estimator not in _SCALABLE:
            raise ValueError(
                f"normalize_std does not go with estimator {self.estimator!r}; it goes with "
                + ", ".join(_SCALABLE)
            )
        temperature = getattr(self, "temperature", 1.0)
        if self.off_policy != "train" and temperature == 0:
            raise ValueError(
                f"temperature 0 and off_policy {self.off_policy!r} would skip every answer, all of "
                "them greedy: raise the temperature, or set off_policy to train"
            )
        return self

    def given_options(self) -> dict[str, float | str]:
        """The loss's options that were set, as the learner takes them."""
        names = (*LOSS_OPTIONS[self.loss], *_SHARED_OPTIONS)
        found = {
            name: value for name in names if (value := getattr(self, name)) is not None
        }  # what is None is left to the loss
        return found | {"correction": correction(self)}

    @property
    def compares(self) -> bool:
        """Whether rollouts are compared with others of their group."""
        return self.estimator not in ("reinforce", "gae")


def _check_loss(config: AlgorithmConfig) -> None:
    own = LOSS_OPTIONS[config.loss]
    for name in sorted({name for names in LOSS_OPTIONS.values() for name in names} - set(own)):
        if getattr(config, name) is not None:
            losses = [loss for loss, names in LOSS_OPTIONS.items() if name in names]
            raise ValueError(
                f"{name} does not go with loss {config.loss!r}: it belongs to {', '.join(losses)}"
            )
    high = 1.2 if config.clip_high_threshold is None else config.clip_high_threshold
    if config.dual_clip_threshold is not None and config.dual_clip_threshold <= high:
        raise ValueError(
            f"dual_clip_threshold {config.dual_clip_threshold} must exceed clip_high_threshold "
            f"{high}: 3 is usual"
        )


def _check_dependencies(config: AlgorithmConfig) -> None:
    for name, other, needed, words in _NEEDS:
        if getattr(config, name) is None:
            continue
        if name.startswith("std_"):
            fits = config.normalize_std or config.estimator == "reinforce++"
        elif name == "length_constant":
            fits = length_normalization(config) == "constant"
        elif other == "kl_coef":
            fits = config.kl_coef > 0
        else:
            given = correction(config) if other == "correction" else getattr(config, other)
            fits = given in needed
        if not fits:
            raise ValueError(f"{name} has no effect: it needs {words}")


def correction(config: AlgorithmConfig) -> Literal["none", "truncate", "mask"]:
    # Only training has a staleness.
    ahead, stale = getattr(config, "max_staleness", 0), getattr(config, "stale", None)
    corrects = ahead > 0 and stale != "drop"
    return config.correction or ("truncate" if corrects else "none")


def length_normalization(
    config: AlgorithmConfig,
) -> Literal["token", "sequence", "rollout", "constant"]:
    return config.length_normalization or ("constant" if config.estimator == "dr_grpo" else "token")


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _scaling(config: AlgorithmConfig) -> Scaling:
    from agentrl_trainer.data.advantages import Scaling

    return Scaling(
        ddof=1 if config.std_ddof is None else config.std_ddof,
        epsilon=_or(config.std_epsilon, 1e-6),
    )


def step_settings(
    config: AlgorithmConfig,
    *,
    adapters: frozenset[str],
    max_length: int,
    min_group: int,
    max_tokens: int,
) -> StepSettings:
    """How records become datums, as configured."""
    from agentrl_trainer.data.batch_assembly import StepSettings
    from agentrl_trainer.data.skip_reasons import SkipRules

    return StepSettings(
        adapters=adapters,
        max_length=max_length,
        estimator=config.estimator,
        normalize_std=config.normalize_std,
        min_group=min_group,
        scaling=_scaling(config),
        discount=_or(config.discount, 1.0),
        step_weight=_or(config.step_weight, 1.0),
        length_normalization=length_normalization(config),
        length_constant=config.length_constant or max_tokens,
        rules=SkipRules(tuple(config.skip_agents), config.truncated, config.off_policy),
    )


def update_settings(config: AlgorithmConfig, *, epochs: int) -> UpdateSettings:
    """How datums become updates, as configured."""
    from agentrl_trainer.learner.prepare_batch import Gae, UpdateSettings

    gae = Gae(
        discount=_or(config.discount, 1.0),
        trace=_or(config.gae_lambda, 0.95),
        whiten=config.normalize_std,
        scaling=_scaling(config),
    )
    return UpdateSettings(
        loss=config.loss,
        loss_config=config.given_options(),
        epochs=epochs,
        reference=None if config.kl_reference is None else REFERENCE,
        gae=gae if config.estimator == "gae" else None,
    )


def value_params(config: AlgorithmConfig) -> ValueParams | None:
    """How a value function learns; None without one."""
    from agentrl_trainer.learner.loss_options import ValueParams

    if config.estimator != "gae":
        return None
    return ValueParams(lr=_or(config.value_lr, 1e-3), clip=_or(config.value_clip, 0.2))
