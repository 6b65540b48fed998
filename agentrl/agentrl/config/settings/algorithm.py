"""The settings of the algorithm, with a table of options for each loss and estimator.

The table of a loss is the class that the trainer reads, of ``loss_options``.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    AfterValidator,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from agentrl.config.field_types import (
    Count,
    Names,
    NonNegative,
    Positive,
    Share,
    Table,
    choice_or_function,
)
from agentrl_trainer.learner.loss_options import (
    ClipOptions,
    CorrectionOptions,
    DppoOptions,
    DroOptions,
    GspoOptions,
    KlOptions,
    PpoOptions,
)

RewardLoss = Literal["importance_sampling", "ppo", "cispo", "dro", "gspo", "dppo"]
Estimator = Literal[
    "grpo", "dr_grpo", "rloo", "reinforce++", "maxrl", "reinforce", "turn", "gigpo", "gae"
]

LossOrFunction = Annotated[str, AfterValidator(partial(choice_or_function, get_args(RewardLoss)))]
EstimatorOrFunction = Annotated[
    str, AfterValidator(partial(choice_or_function, get_args(Estimator)))
]


def table_of(choice: str) -> str:
    """Name the table that holds the options of a loss or an estimator."""
    return choice.replace("++", "_plus_plus")


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


class KlSettings(KlOptions):
    reference: Path | None = None
    """PEFT folder of the reference adapter; by default the base model."""


class CorrectionSettings(CorrectionOptions):
    mode: Literal["none", "truncate", "mask"] | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    """By default none; truncate with a max_staleness, unless stale is drop, and with
    rounded sampler.weights."""


class AlgorithmSettings(Table):
    """Advantages and losses. A loss and an estimator have their options in their own tables."""

    loss: LossOrFunction = "importance_sampling"
    """Loss, with Tinker's semantics; or module:function. See own-algorithms.md."""
    estimator: EstimatorOrFunction = "grpo"
    """How rewards become advantages; or module:function. See own-algorithms.md."""
    length_normalization: Literal["token", "sequence", "rollout", "constant"] | None = None
    """The loss is a mean over tokens (default), sequences, rollouts, or a constant (dr_grpo's)."""
    length_constant: Count | None = None
    """That constant number of tokens; by default sampler.max_tokens."""
    truncated: Literal["train", "skip"] = "train"
    """Train on answers cut off at their token limit, or skip them."""
    off_policy: Literal["train", "weight", "skip"] = "train"
    """Answers sampled greedily, with top-p, top-k, a bias or a grammar: train on them unchanged,
    weight those whose weight is known, or skip them."""
    skip_agents: Names = Field(default_factory=list[str])
    """Agents whose calls never train, such as title or summar* (patterns)."""
    ppo: PpoOptions = PpoOptions()
    cispo: ClipOptions = ClipOptions()
    dro: DroOptions = DroOptions()
    gspo: GspoOptions = GspoOptions()
    dppo: DppoOptions = DppoOptions()
    grpo: GroupSettings = GroupSettings()
    rloo: GroupSettings = GroupSettings()
    reinforce_plus_plus: DeviationSettings = DeviationSettings()
    turn: TurnSettings = TurnSettings()
    gigpo: GigpoSettings = GigpoSettings()
    gae: GaeSettings = GaeSettings()
    kl: KlSettings = KlSettings()
    correction: CorrectionSettings = CorrectionSettings()

    @model_validator(mode="after")
    def _check_tables(self) -> Self:
        for what, value in self._unchosen():
            if given := getattr(self, table_of(value)).model_fields_set:
                raise ValueError(
                    f"{table_of(value)}.{min(given)}: has no effect with {what} "
                    f'{getattr(self, what)!r}; set algorithm.{what} = "{value}", or leave it out'
                )
        return self

    @model_serializer(mode="wrap")
    def _chosen_tables(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out the tables of losses and estimators that are not chosen."""
        unchosen = {table_of(value) for _, value in self._unchosen()}
        return {k: v for k, v in dump(self).items() if k not in unchosen}

    def _unchosen(self) -> Iterator[tuple[str, str]]:
        """Yield ``loss`` or ``estimator``, and a choice not taken that has a table."""
        for what, choices in (("loss", RewardLoss), ("estimator", Estimator)):
            for value in get_args(choices):
                if value != getattr(self, what) and table_of(value) in type(self).model_fields:
                    yield what, value

    @property
    def of_estimator(self) -> DeviationSettings:
        """The options of the chosen estimator; the defaults for one that has none."""
        return getattr(self, table_of(self.estimator), DeviationSettings())
