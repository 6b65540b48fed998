"""The space has names of settings and values that they take; each refusal names what is wrong."""

from __future__ import annotations

from typing import Any

import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from sweeps import sweep_config

from agentrl.config.commands import SweepConfig
from agentrl.config.errors import ConfigError
from agentrl.sweep.space import read_space, trial_settings


def test_lists_and_ranges_become_distributions_and_settings_of_a_trial() -> None:
    config = sweep_config(
        {
            "learning.learning_rate": {"low": 1e-4, "high": 1e-2, "log": True},
            "learning.rank": {"low": 4, "high": 16, "step": 4},
            "algorithm.loss": ["ppo", "cispo", "ppo"],
        }
    )
    assert read_space(config) == {
        "learning.learning_rate": FloatDistribution(1e-4, 1e-2, log=True),
        "learning.rank": IntDistribution(4, 16, step=4),
        "algorithm.loss": CategoricalDistribution(("ppo", "cispo")),
    }
    assert trial_settings(config, {"learning.rank": 4, "sampler.temperature": 0.5}) == {
        "agent": {"entrypoint": "agent.py:agent", "tasks": "tasks.jsonl"},
        "learning": {"alpha": 16, "rank": 4},
        "run": {"steps": 9},  # its name is the sweep's
        "sampler": {"temperature": 0.5},
    }
    assert trial_settings(config, {})["learning"] == {"alpha": 16}
    evaluated = {"tasks": "held_out.jsonl", "samples": 4}  # at each trial's own temperature
    given = {
        **trial_settings(config, {}),
        "evaluation": evaluated,
        "sweep": {"space": {"run.steps": [1]}},
    }
    given["guards"] = {"max_hours": None}  # as of a line without a value in YAML
    settings = trial_settings(SweepConfig.model_validate(given), {})
    assert (settings["evaluation"], settings.get("guards", {})) == (evaluated, {})


@pytest.mark.parametrize(
    ("space", "said"),
    [
        ({"learning.learn_rate": [1]}, "learning.learn_rate: .* Did you mean learning.learn"),
        ({"learning": {"rank": [1]}}, "learning: there is no such setting.*in quotes"),
        ({"learning.rank": [8, 0]}, "learning.rank: got 0, but .*greater than or equal to 1"),
        ({"learning.rank": {"low": 1.5, "high": 8}}, "learning.rank: got 1.5, but"),
        ({"learning.rank": {"low": 8, "high": 4}}, "learning.rank: got .* write a list"),
        ({"learning.rank": {"low": 4, "high": 8, "lgo": True}}, "learning.rank: got .*lgo"),
        ({"learning.rank": []}, r"learning.rank: got \[\]; write a list"),
        ({"algorithm.loss": ["ppo", "pop"]}, "algorithm.loss: got 'pop'"),
        ({"run.seed": [1, 2]}, "run.seed: cannot be searched.* sweep.seeds"),
    ],
)
def test_a_wrong_name_or_value_is_refused_and_named(space: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_space(sweep_config(space))


def test_what_would_hide_the_space_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"learning.alpha: a grid needs a list of values"):
        read_space(sweep_config({"learning.alpha": {"low": 1, "high": 4}}, sampler="grid"))
    monkeypatch.setenv("AGENTRL_LEARNING__RANK", "8")
    with pytest.raises(ConfigError, match="AGENTRL_LEARNING__RANK would replace it"):
        read_space(sweep_config({"learning.rank": [4]}))
