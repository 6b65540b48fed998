"""The algorithm's settings as the trainer takes them. Loads the trainer only when called."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentrl.config.checks import correction_mode, length_normalization, table_of_estimator

if TYPE_CHECKING:
    from agentrl.config.commands import TrainConfig
    from agentrl.config.settings import AlgorithmSettings
    from agentrl_trainer.data.advantages import Scaling
    from agentrl_trainer.data.batch_assembly import StepSettings
    from agentrl_trainer.learner.loss_options import ValueParams
    from agentrl_trainer.learner.prepare_batch import UpdateSettings

REFERENCE = "kl-reference"  # the name of the reference adapter inside the learner


def loss_options(config: TrainConfig) -> dict[str, float | str]:
    """The options of the loss, and those that every loss has, as the learner takes them."""
    algorithm = config.algorithm
    own = getattr(algorithm, algorithm.loss, None)
    found = {} if own is None else own.model_dump(exclude_unset=True, exclude_none=True)
    kl = algorithm.kl.model_dump(exclude_unset=True, exclude={"reference"})
    weights = algorithm.correction.model_dump(exclude_unset=True, exclude={"mode"})
    found |= {f"kl_{name}": value for name, value in kl.items()} | {"kl_coef": algorithm.kl.coef}
    found |= {f"correction_{name}": value for name, value in weights.items()}
    return found | {"correction": correction_mode(config)}


def step_settings(
    config: TrainConfig, *, adapters: frozenset[str], max_length: int
) -> StepSettings:
    """How records become datums."""
    from agentrl_trainer.data.batch_assembly import StepSettings

    algorithm = config.algorithm
    options = _estimator_options(algorithm)
    return StepSettings(
        adapters=adapters,
        max_length=max_length,
        estimator=algorithm.estimator,
        normalize_std=getattr(options, "normalize_std", False),
        min_group=config.rollouts.min_group,
        scaling=_scaling(options),
        discount=getattr(options, "discount", 1.0),
        step_weight=algorithm.gigpo.step_weight,
        length_normalization=length_normalization(algorithm),
        length_constant=algorithm.length_constant or config.sampler.max_tokens,
        skip_agents=tuple(algorithm.skip_agents),
        truncated=algorithm.truncated,
        off_policy=algorithm.off_policy,
    )


def update_settings(config: TrainConfig) -> UpdateSettings:
    """How datums become updates."""
    from agentrl_trainer.learner.prepare_batch import Gae, UpdateSettings

    algorithm, options = config.algorithm, config.algorithm.gae
    gae = Gae(
        discount=options.discount,
        trace=options.gae_lambda,
        whiten=options.normalize_std,
        scaling=_scaling(options),
    )
    return UpdateSettings(
        loss=algorithm.loss,
        loss_config=loss_options(config),
        epochs=config.learning.epochs,
        reference=None if algorithm.kl.reference is None else REFERENCE,
        gae=gae if algorithm.estimator == "gae" else None,
    )


def value_params(config: TrainConfig) -> ValueParams | None:
    """How a value function learns; None without one."""
    from agentrl_trainer.learner.loss_options import ValueParams

    if config.algorithm.estimator != "gae":
        return None
    options = config.algorithm.gae
    return ValueParams(lr=options.value_lr, clip=options.value_clip)


def _estimator_options(algorithm: AlgorithmSettings) -> object:
    return getattr(algorithm, table_of_estimator(algorithm.estimator), None)


def _scaling(options: object) -> Scaling:
    from agentrl.config.algorithm_options import DeviationSettings
    from agentrl_trainer.data.advantages import Scaling

    given = options if isinstance(options, DeviationSettings) else DeviationSettings()
    return Scaling(ddof=given.std_ddof, epsilon=given.std_epsilon)
