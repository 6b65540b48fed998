"""Several adapters: how they are written down, and how their folders are found again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from settings import nested

from agentrl.config.commands import EvalConfig, TrainConfig
from agentrl.config.errors import ConfigError, explain
from agentrl.runs.folder import adapter_folders


def config(**settings: Any) -> TrainConfig:
    return TrainConfig(**nested(agent="json:loads", tasks=Path("t"), **settings))


def test_one_adapter_is_the_default_and_answers_every_name() -> None:
    assert list(config().trained) == ["policy"]
    assert config().sole_adapter == "policy"
    assert config(adapter="player").sole_adapter == "player"


@pytest.mark.parametrize("written", [["asker", "answerer"], "asker,answerer", "asker, answerer"])
def test_names_alone_are_enough(written: Any) -> None:
    given = config(adapters=written)
    assert list(given.trained) == ["asker", "answerer"]
    assert given.sole_adapter is None
    assert given.trained["asker"].agents is None


def test_the_table_says_who_trains_what_on_which_reward() -> None:
    table = {"asker": {"agents": ["Asker"], "rewards": ["question"]}, "answerer": {}}
    given = config(adapters=json.dumps(table))
    assert given.trained["asker"].agents == ["Asker"]
    assert given.trained["asker"].rewards == ["question"]
    # A resumed run reads back what the first one wrote.
    again = TrainConfig(**given.model_dump(mode="json"))
    assert again == given


@pytest.mark.parametrize(
    ("adapters", "message"),
    [
        (["asker", "asker"], "adapters: got ['asker', 'asker'], but a name is there twice"),
        (["a b"], "adapters.a b: a name has letters"),
        (["agentrl-tiny"], "adapters.agentrl-tiny: this is the base model's name"),
        ({"x": {"agents": []}}, "adapters.x.agents"),
        ({"x": {"role": "y"}}, "adapters.x.role: there is no such setting"),
        (
            {"x": {"agents": ["A"]}, "y": {"agents": ["A"]}},
            "adapters.y.agents: 'A' trains x already",
        ),
        ("{", "not valid JSON"),
    ],
)
def test_mistakes_name_the_field(adapters: Any, message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        config(adapters=adapters)
    assert message in explain(caught.value, TrainConfig)


def test_another_model_cannot_have_an_adapters_name() -> None:
    with pytest.raises(ValidationError, match="trained model's"):
        config(adapters=["judge"], models=json.dumps({"judge": {"model": "openai/x"}}))


def peft_folder(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "adapter_config.json").write_text("{}")
    return path


def test_folders_are_found_by_name(tmp_path: Path) -> None:
    one = peft_folder(tmp_path / "one")
    two = [peft_folder(tmp_path / "both" / name) for name in ("answerer", "asker")]

    def evaluation(**settings: Any) -> EvalConfig:
        return EvalConfig(**nested(agent="json:loads", **{"evaluation.tasks": "t"}, **settings))

    assert adapter_folders(one, evaluation()) == {"policy": one}
    assert adapter_folders(one, evaluation(adapter="player")) == {"player": one}
    both = tmp_path / "both"
    assert adapter_folders(both, evaluation()) == {"answerer": two[0], "asker": two[1]}
    assert adapter_folders(both, evaluation(adapters="asker")) == {"asker": two[1]}
    with pytest.raises(ConfigError, match="has no folder judge; it has answerer, asker"):
        adapter_folders(both, evaluation(adapters="asker,judge"))
    with pytest.raises(ConfigError, match="is one adapter, but adapters names asker, judge"):
        adapter_folders(one, evaluation(adapters="asker,judge"))
    with pytest.raises(ConfigError, match="no PEFT folder"):
        adapter_folders(tmp_path / "nowhere", evaluation())
