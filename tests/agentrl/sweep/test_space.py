"""The space has names of settings and values that they take; each refusal names what is wrong."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.config.commands import SweepConfig
from agentrl.config.errors import ConfigError
from agentrl.sweep.space import Dimension, read_space, shared_settings, with_values


def config(space: dict[str, Any], **sweep: Any) -> SweepConfig:
    return SweepConfig.model_validate(
        {
            "agent": {"entrypoint": "agent.py:agent", "tasks": "tasks.jsonl"},
            "learning": {"rank": 16},
            "run": {"name": "mine", "steps": 5},
            "sweep": {"space": space, **sweep},
        }
    )


def test_lists_and_ranges_are_read_with_and_without_quotes_around_their_names() -> None:
    space = {
        "learning.learning_rate": {"low": 1e-4, "high": 1e-2, "log": True},
        "learning": {"rank": {"low": 4, "high": 16, "step": 4}},
        "algorithm.loss": ["ppo", "cispo", "ppo"],
    }
    assert read_space(config(space)) == [
        Dimension("learning.learning_rate", low=1e-4, high=1e-2, log=True),
        Dimension("learning.rank", low=4, high=16, step=4, whole=True),
        Dimension("algorithm.loss", choices=("ppo", "cispo")),
    ]
    assert read_space(config(space))[1].values() == [4, 8, 12, 16]


@pytest.mark.parametrize(
    ("space", "said"),
    [
        (
            {"learning.learn_rate": [1]},
            "learning.learn_rate: .* Did you mean learning.learn",
        ),
        ({"learning": {"rnak": [1]}}, "sweep.space.learning.rnak: .* Did you mean learning.rank"),
        ({"learning.rank": [8, 0]}, "learning.rank: got 0, but .*greater than or equal to 1"),
        ({"learning.rank": [8, "many"]}, "learning.rank: got 'many'"),
        ({"learning.rank": {"low": 0, "high": 8}}, "learning.rank: got 0, but"),
        ({"learning.rank": {"low": 1.5, "high": 8}}, "learning.rank: the setting takes whole"),
        ({"learning.rank": {"low": 8, "high": 4}}, "learning.rank: low must be below high"),
        ({"learning.rank": {"low": 8}}, "learning.rank: low, high and step must be numbers"),
        ({"learning.rank": {"low": 4, "high": 8, "lgo": True}}, "learning.rank: got .*lgo"),
        ({"learning.alpha": {"low": 0, "high": 8, "log": True}}, "learning.alpha: .*above 0"),
        ({"learning.rank": []}, r"learning.rank: got \[\]; write a list"),
        ({"algorithm.loss": ["ppo", "pop"]}, "algorithm.loss: got 'pop'"),
        ({"run.seed": [1, 2]}, "run.seed: cannot be searched; .* sweep.seeds"),
        ({"learning": [1, 2]}, "learning: there is no such setting"),
    ],
)
def test_a_wrong_name_or_value_is_refused_and_named(space: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_space(config(space))


def test_a_grid_refuses_a_range_without_steps() -> None:
    with pytest.raises(ConfigError, match=r"learning_rate: a grid needs a list of values, or a s"):
        read_space(config({"learning.learning_rate": {"low": 1e-4, "high": 1}}, sampler="grid"))


def test_a_trial_has_the_settings_of_the_file_with_its_values_and_no_name_of_the_sweep() -> None:
    settings = shared_settings(config({"learning.rank": [1]}))
    changed = with_values(settings, {"learning.rank": 4, "sampler.temperature": 0.5})
    assert changed == {
        "agent": {"entrypoint": "agent.py:agent", "tasks": "tasks.jsonl"},
        "learning": {"rank": 4},
        "run": {"steps": 5},
        "sampler": {"temperature": 0.5},
    }
    assert settings["learning"] == {"rank": 16}
