"""Settings of the algorithm: what goes with what, and that they reach the trainer."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from agentrl.config.algorithm import (
    LOSS_OPTIONS,
    AlgorithmConfig,
    correction,
    step_settings,
    update_settings,
    value_params,
)
from agentrl.config.settings import TrainConfig
from agentrl_trainer.learner.loss_options import (
    OPTIONS_OF,
    CorrectionOptions,
    KlOptions,
    PpoOptions,
    ValueParams,
    parse_loss_options,
)


def config(**options: Any) -> TrainConfig:
    return TrainConfig(agent="x:y", tasks=Path("tasks.jsonl"), **options)


def settings(**options: Any) -> Any:
    return step_settings(
        config(**options),
        adapters=frozenset({"policy"}),
        max_length=100,
        min_group=2,
        max_tokens=77,
    )


def test_the_table_of_options_is_that_of_the_losses() -> None:
    for name, options in LOSS_OPTIONS.items():
        assert set(options) == {field.name for field in fields(OPTIONS_OF[name])}
    # All but the one that is not for rewards.
    assert LOSS_OPTIONS.keys() == OPTIONS_OF.keys() - {"cross_entropy"}


def test_the_defaults_change_nothing() -> None:
    done = update_settings(config(), epochs=1)
    assert done.loss == "importance_sampling"
    assert done.gae is None
    assert parse_loss_options(done.loss, done.loss_config) == parse_loss_options(done.loss, {})
    assert settings().length_normalization == "token"
    assert value_params(config()) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "dro", "clip_low_threshold": 0.8}, "'dro': it belongs to ppo, cispo, gspo"),
        ({"beta": 0.1}, "beta does not go with loss 'importance_sampling'"),
        ({"loss": "ppo", "dual_clip_threshold": 1.1}, "must exceed clip_high_threshold 1.2"),
        ({"kl_estimator": "k2"}, "kl_estimator has no effect: it needs a kl_coef above 0"),
        ({"kl_reference": Path("somewhere")}, "kl_reference has no effect"),
        ({"correction_high": 3.0}, "needs correction truncate or mask"),
        ({"std_ddof": 0}, "needs normalize_std"),
        ({"discount": 0.9}, "needs estimator turn, gigpo or gae"),
        ({"estimator": "turn", "step_weight": 1.0}, "needs estimator gigpo"),
        ({"value_lr": 0.1}, "needs estimator gae"),
        ({"length_constant": 5}, "needs length_normalization constant"),
        ({"estimator": "maxrl", "normalize_std": True}, "it goes with grpo, rloo"),
        ({"estimator": "dr_grpo", "normalize_std": True}, "it goes with grpo"),
        ({"off_policy": "skip", "temperature": 0}, "would skip every answer"),
        ({"clip_low_threshold": 1.2, "loss": "ppo"}, "less than or equal to 1"),
        ({"estimator": "gigpo", "group_size": 1}, "group_size 1 is too small"),
    ],
)
def test_combinations_without_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        config(**options)


def test_settings_reach_the_trainer() -> None:
    done = update_settings(
        config(
            loss="ppo",
            clip_high_threshold=1.28,
            kl_coef=0.1,
            kl_estimator="k2",
            correction="mask",
            correction_level="sequence",
            estimator="gae",
            discount=0.99,
            gae_lambda=0.9,
            normalize_std=True,
            std_ddof=0,
            std_epsilon=1e-4,
        ),
        epochs=3,
    )
    options = parse_loss_options("ppo", done.loss_config)
    assert options.own == PpoOptions(0.8, 1.28)
    assert options.kl == KlOptions(0.1, "k2")
    assert options.correction == CorrectionOptions("mask", "sequence")
    assert done.gae is not None
    assert (done.gae.discount, done.gae.trace, done.gae.whiten) == (0.99, 0.9, True)
    assert (done.gae.scaling.ddof, done.gae.scaling.epsilon) == (0, 1e-4)
    assert value_params(config(estimator="gae", value_lr=0.5)) == ValueParams(lr=0.5)

    step = settings(estimator="dr_grpo", truncated="skip", skip_agents=["title"])
    assert (step.length_normalization, step.length_constant) == ("constant", 77)
    assert (step.rules.truncated, step.rules.skip_agents) == ("skip", ("title",))
    scaled = settings(normalize_std=True, std_ddof=0, std_epsilon=1e-4).scaling
    assert (scaled.ddof, scaled.epsilon) == (0, 1e-4)
    assert config(estimator="gae", group_size=1).group_size == 1
    assert AlgorithmConfig(estimator="turn").compares


def test_asynchronous_settings() -> None:
    done = config(max_staleness=1)
    assert update_settings(done, epochs=1).loss_config["correction"] == "truncate"
    again = TrainConfig.model_validate(done.model_dump())  # as a resumed run reads it
    assert correction(again) == "truncate"
    assert correction(config(max_staleness=1, correction_high=5)) == "truncate"
    assert correction(config(max_staleness=1, stale="wait")) == "truncate"
    assert correction(config(max_staleness=1, correction="none")) == "none"
    assert correction(config(max_staleness=1, stale="drop")) == "none"
    assert correction(config(max_staleness=1, stale="drop", correction="mask")) == "mask"
    assert correction(config()) == "none"
    resumed = TrainConfig.model_validate(config().model_dump() | {"max_staleness": 1})
    assert correction(resumed) == "truncate"
    for options, message in (
        ({"stale": "drop"}, "it needs a max_staleness above 0"),
        ({"max_staleness": 1, "stale": "correct", "correction": "none"}, "contradict each other"),
        ({"resample_zero_variance": 1, "estimator": "gae"}, "does not go with estimator 'gae'"),
        ({"max_staleness": -1}, "greater than or equal to 0"),
    ):
        with pytest.raises(ValidationError, match=message):
            config(**options)
