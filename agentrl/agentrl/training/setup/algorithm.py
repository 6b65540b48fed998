"""Pass the settings of the algorithm to the trainer, as its classes take them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agentrl.config.checks import correction_mode, length_normalization
from agentrl_trainer.data.advantages import Scaling
from agentrl_trainer.data.batch_assembly import StepSettings
from agentrl_trainer.learner.loss_options import ValueParams, flat_name
from agentrl_trainer.learner.prepare_batch import Gae, UpdateSettings

if TYPE_CHECKING:
    from agentrl.config.commands import TrainConfig
    from agentrl.config.settings.algorithm import DeviationSettings

REFERENCE = "kl-reference"  # the name of the reference adapter inside the learner


def step_settings(
    config: TrainConfig, *, adapters: frozenset[str], max_length: int
) -> StepSettings:
    """How records become datums."""
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
        one_temperature=config.run.backend == "verl",
    )


def update_settings(config: TrainConfig) -> UpdateSettings:
    """How datums become updates, with the options of the loss and those that every loss has."""
    algorithm, gae = config.algorithm, config.algorithm.gae
    parts: dict[str, dict[str, Any]] = {
        "own": dict(getattr(algorithm, algorithm.loss, ())),
        "kl": algorithm.kl.model_dump(exclude={"reference"}),
        "correction": {**dict(algorithm.correction), "mode": correction_mode(config)},
    }
    return UpdateSettings(
        loss=algorithm.loss,
        loss_config={
            flat_name(part, name): value
            for part, options in parts.items()
            for name, value in options.items()
        },
        epochs=config.learning.epochs,
        reference=None if algorithm.kl.reference is None else REFERENCE,
        gae=Gae(gae.discount, gae.gae_lambda, whiten=gae.normalize_std, scaling=_scaling(gae))
        if algorithm.estimator == "gae"
        else None,
    )


def value_params(config: TrainConfig) -> ValueParams | None:
    """How a value function learns; None without one."""
    options = config.algorithm.gae
    has_values = config.algorithm.estimator == "gae"
    return ValueParams(lr=options.value_lr, clip=options.value_clip) if has_values else None


def _scaling(options: DeviationSettings) -> Scaling:
    return Scaling(ddof=options.std_ddof, epsilon=options.std_epsilon)
