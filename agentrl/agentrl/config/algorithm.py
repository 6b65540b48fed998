"""The algorithm's settings as the trainer takes them. Loads the trainer only when called."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentrl.config.checks import correction_mode, length_normalization

if TYPE_CHECKING:
    from agentrl.config.algorithm_options import DeviationSettings
    from agentrl.config.commands import TrainConfig
    from agentrl_trainer.data.advantages import Scaling
    from agentrl_trainer.data.batch_assembly import StepSettings
    from agentrl_trainer.learner.loss_options import ValueParams
    from agentrl_trainer.learner.prepare_batch import UpdateSettings

REFERENCE = "kl-reference"  # the name of the reference adapter inside the learner


def loss_options(config: TrainConfig) -> dict[str, float | str]:
    """The options of the loss, and those that every loss has, as the learner takes them."""
    algorithm = config.algorithm
    found = dict(getattr(algorithm, algorithm.loss, ()))
    found |= {f"kl_{name}": value for name, value in algorithm.kl if name != "reference"}
    found |= {f"correction_{name}": value for name, value in algorithm.correction}
    found["correction"] = correction_mode(config)
    del found["correction_mode"]
    return {name: value for name, value in found.items() if value is not None}


def step_settings(
    config: TrainConfig, *, adapters: frozenset[str], max_length: int
) -> StepSettings:
    """How records become datums."""
    from agentrl_trainer.data.batch_assembly import StepSettings

    algorithm, options = config.algorithm, config.algorithm.of_estimator
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

    options = config.algorithm.gae
    has_values = config.algorithm.estimator == "gae"
    return ValueParams(lr=options.value_lr, clip=options.value_clip) if has_values else None


def _scaling(options: DeviationSettings) -> Scaling:
    from agentrl_trainer.data.advantages import Scaling

    return Scaling(ddof=options.std_ddof, epsilon=options.std_epsilon)
