"""Settings of the algorithm: what goes with what, and that they reach the trainer."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from pydantic import ValidationError
from settings import nested

from agentrl.config.checks import correction_mode
from agentrl.config.commands import TrainConfig
from agentrl.config.settings.algorithm import AlgorithmSettings, RewardLoss
from agentrl.training.setup.algorithm import step_settings, update_settings, value_params
from agentrl_trainer.learner.loss_options import (
    OPTIONS_OF,
    CorrectionOptions,
    KlOptions,
    LossOptions,
    PpoOptions,
    ValueParams,
    parse_loss_options,
)
from agentrl_trainer.learner.optimizers import default_learning_rate

TABLES = ("rollouts.", "sampler.", "learning.", "evaluation.", "run.")


def config(options: dict[str, Any]) -> TrainConfig:
    """Options of the algorithm, by their names in its table, or of another one, by dotted names."""
    named = {k if k.startswith(TABLES) else f"algorithm.{k}": v for k, v in options.items()}
    return TrainConfig(**nested(agent="x:y", tasks="tasks.jsonl", **named))


def settings(options: dict[str, Any]) -> Any:
    return step_settings(config(options), adapters=frozenset({"policy"}), max_length=100)


def test_every_loss_with_options_has_a_table() -> None:
    tables = {name for name in get_args(RewardLoss) if name in AlgorithmSettings.model_fields}
    # All but importance_sampling, which has none, and the one that is not for rewards.
    assert tables == OPTIONS_OF.keys() - {"importance_sampling", "cross_entropy"}
    assert all(
        AlgorithmSettings.model_fields[name].annotation is OPTIONS_OF[name] for name in tables
    )


def test_the_defaults_change_nothing() -> None:
    done = update_settings(config({}))
    assert (done.loss, done.gae) == ("importance_sampling", None)
    assert parse_loss_options(done.loss, done.loss_config) == parse_loss_options(done.loss, {})
    assert settings({}).length_normalization == "token"
    assert value_params(config({})) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "dro", "ppo.clip_low_threshold": 0.8}, 'with loss .dro.; set algorithm.loss = "'),
        ({"dro.beta": 0.1}, "dro.beta: has no effect with loss 'importance_sampling'"),
        ({"turn.discount": 0.9}, "turn.discount: has no effect with estimator 'grpo'"),
        ({"loss": "ppo", "ppo.dual_clip_threshold": 1.1}, "must exceed clip_high_threshold 1.2"),
        ({"kl.estimator": "k2"}, "kl.estimator: has no effect without .*kl.coef above 0"),
        ({"kl.reference": "somewhere"}, "kl.reference: has no effect"),
        ({"correction.high": 3.0}, "without mode truncate or mask"),
        ({"grpo.std_ddof": 0}, "without algorithm.grpo.normalize_std"),
        ({"length_constant": 5}, "without length_normalization constant"),
        ({"estimator": "maxrl", "grpo.normalize_std": True}, "no effect with estimator 'maxrl'"),
        ({"off_policy": "skip", "sampler.temperature": 0}, "would skip every answer"),
        ({"ppo.clip_low_threshold": 1.2, "loss": "ppo"}, "less than or equal to 1"),
        ({"estimator": "gigpo", "rollouts.group_size": 1}, "group_size: 1 is too small"),
        ({"rollouts.stale": "drop"}, "without a max_staleness above 0"),
        ({"rollouts.max_staleness": 1, "rollouts.stale": "correct", "correction.mode": "none"},
         "none contradicts rollouts.stale correct"),
        ({"rollouts.resample_zero_variance": 1, "estimator": "gae"}, "not go with estimator 'gae'"),
        ({"rollouts.max_staleness": -1}, "greater than or equal to 0"),
        ({"evaluation.stop_at": 0.9}, "evaluation.stop_at: has no effect without evaluation.tasks"),
        ({"run.steps": 10, "learning.warmup_steps": 10}, "10 leave none of 10 .* at most 9"),
    ],
)  # fmt: skip
def test_combinations_without_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        config(options)


def test_combinations_with_sense_are_not() -> None:
    config({"evaluation.stop_at": 0.9, "evaluation.tasks": "e"})
    config({"run.steps": 10, "learning.warmup_steps": 9})
    config({"estimator": "reinforce", "rollouts.group_size": 1, "rollouts.min_group": 1})


def test_settings_reach_the_trainer() -> None:
    given = {
        "loss": "ppo", "ppo.clip_high_threshold": 1.28, "kl.coef": 0.1, "kl.estimator": "k2",
        "correction.mode": "mask", "correction.level": "sequence", "estimator": "gae",
        "gae.discount": 0.99, "gae.gae_lambda": 0.9, "gae.normalize_std": True, "gae.std_ddof": 0,
        "gae.std_epsilon": 1e-4, "gae.value_lr": 0.5, "learning.epochs": 3,
        "rollouts.group_size": 1,
    }  # fmt: skip
    done = update_settings(config(given))
    assert done.epochs == 3
    options = parse_loss_options("ppo", done.loss_config)
    assert options == LossOptions(
        PpoOptions(clip_high_threshold=1.28),
        KlOptions(coef=0.1, estimator="k2"),
        CorrectionOptions(mode="mask", level="sequence"),
    )
    assert done.gae is not None
    assert (done.gae.discount, done.gae.trace, done.gae.whiten) == (0.99, 0.9, True)
    assert (done.gae.scaling.ddof, done.gae.scaling.epsilon) == (0, 1e-4)
    assert value_params(config(given)) == ValueParams(lr=0.5, clip=0.2)

    step = settings(
        {"estimator": "dr_grpo", "truncated": "skip", "sampler.max_tokens": 77,
         "skip_agents": ["title"]}
    )  # fmt: skip
    assert (step.length_normalization, step.length_constant) == ("constant", 77)
    assert (step.truncated, step.skip_agents) == ("skip", ("title",))
    scaled = settings({"grpo.normalize_std": True, "grpo.std_ddof": 0, "grpo.std_epsilon": 1e-4})
    assert (scaled.normalize_std, scaled.scaling.ddof, scaled.scaling.epsilon) == (True, 0, 1e-4)
    plus = settings({"estimator": "reinforce++", "reinforce_plus_plus.std_ddof": 0})
    assert plus.scaling.ddof == 0
    stepwise = settings({"estimator": "gigpo", "gigpo.discount": 0.5, "gigpo.step_weight": 2.0})
    assert (stepwise.discount, stepwise.step_weight) == (0.5, 2.0)


def test_what_a_run_records_has_the_chosen_tables_only_and_reads_back() -> None:
    given = config({"loss": "ppo", "ppo.clip_low_threshold": 0.7, "estimator": "turn"})
    recorded = given.model_dump(mode="json")
    tables = {name for name, value in recorded["algorithm"].items() if isinstance(value, dict)}
    assert tables == {"ppo", "turn", "kl", "correction"}
    assert TrainConfig.model_validate(recorded) == given


@pytest.mark.parametrize(
    ("staleness", "stale", "correction", "mode"),
    [
        (0, None, {}, "none"),
        (1, None, {}, "truncate"),
        (1, None, {"high": 5}, "truncate"),
        (1, "wait", {}, "truncate"),
        (1, None, {"mode": "none"}, "none"),
        (1, "drop", {}, "none"),
        (1, "drop", {"mode": "mask"}, "mask"),
    ],
)
def test_stale_answers_that_train_are_corrected(
    staleness: int, stale: str | None, correction: dict[str, Any], mode: str
) -> None:
    options = {"rollouts.max_staleness": staleness, "rollouts.stale": stale}
    done = config(options | {f"correction.{name}": value for name, value in correction.items()})
    assert correction_mode(done) == mode
    assert update_settings(done).loss_config["correction"] == mode
    again = TrainConfig.model_validate(done.model_dump())  # as a resumed run reads it
    assert correction_mode(again) == mode


def test_learning_rate_falls_with_size() -> None:
    assert default_learning_rate(850_000) == pytest.approx(1.5e-3)
    assert default_learning_rate(4_000_000_000) == pytest.approx(4e-5)
    assert 4e-5 < default_learning_rate(600_000_000) < 1.5e-3
