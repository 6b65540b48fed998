"""Settings come from flags, variables, files and earlier runs; mistakes name the right setting."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from settings import nested

from agentrl.config.checks import greedy_note
from agentrl.config.commands import EvalConfig, TrainConfig
from agentrl.config.errors import ConfigError, explain
from agentrl.config.loading import load, steps_of
from agentrl.training.queue.curriculum import tasks_in_order

ROOT = Path(__file__).parents[3]


def config(**settings: Any) -> TrainConfig:
    return TrainConfig(**nested(agent="a:b", tasks=Path("t"), **settings))


def train(*flags: str, **environment: str) -> TrainConfig:
    """The settings of ``agentrl train a:b --tasks t`` with more flags."""
    return load(TrainConfig, ["a:b", "--tasks", "t", *flags], environment)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--loss pppo --runners 0", "algorithm.loss: got 'pppo', but input should be"),
        ("--loss pppo --runners 0", "rollouts.runners: got '0', but input should be greater"),
        ("--group-siz 3", "--group-siz: there is no such flag. Did you mean --group-size?"),
        ("--eval-every 3", "--eval-every: there is no such flag. Did you mean --evaluation.every?"),
        ("--kl-coef 3", "Did you mean --algorithm.kl.coef?"),
        ("--frobnicate", "--frobnicate: there is no such flag. See --help-all."),
        ("--runners", "expected one argument"),
        ("other:agent", "one argument too many"),
        ("--sampler.vllm.sleep true", "true, false: a flag of yes or no takes no value"),
        ("--models nonsense", "models: got 'nonsense', but it is not valid JSON"),
        ("AGENTRL_GROUP_SIZE=1", "Did you mean rollouts.group_size?"),
        ("AGENTRL_ROLLOUTS__GROUP_SIZ=1", "Did you mean rollouts.group_size?"),
        ("AGENTRL_ROLLOUTS__GROUP_SIZE=-1", "rollouts.group_size: got '-1'"),
        ("AGENTRL_TRACKERS__X=1", "there is no such setting"),
        ("AGENTRL_RUN__TRACKERS={", "not valid JSON"),
        ("[learning]\nlearning_rat = 1.0", "Did you mean learning.learning_rate?"),
        ("[learning]\ngroup_size = 1", "Did you mean rollouts.group_size?"),
        ("timeout = 1", "timeout: there is no such setting. Did you mean rollouts.timeout?"),
        ('model = "x"', "model: is a table of settings, such as model.name"),
        ("[rollout]\nrunners = 1", "rollout: there is no such setting. Did you mean rollouts?"),
        ("[learning", "cannot read"),
    ],
)  # fmt: skip
def test_wrong_flags_variables_and_keys_name_the_right_ones(
    given: str, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "c.toml"
    file.write_text(given)
    environment: dict[str, str] = {}
    flags = ["--config", str(file)] if " = " in given or given[0] == "[" else given.split()
    if given.startswith("AGENTRL_"):
        environment, flags = dict([given.split("=")]), []
    with pytest.raises(ConfigError) as caught:
        train(*flags, **environment)
    assert message in str(caught.value)


def test_a_misspelled_key_comes_before_what_is_missing_for_it(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('[agent]\nentrypont = "json:loads"\n')
    with pytest.raises(ConfigError) as caught:
        load(TrainConfig, ["--config", str(file)], {})
    first, *rest = str(caught.value).splitlines()
    assert first == "agent.entrypont: there is no such setting. Did you mean agent.entrypoint?"
    assert "agent.entrypoint: is missing" in " ".join(rest), caught.value


def test_a_command_line_after_two_dashes_is_the_agent() -> None:
    done = load(TrainConfig, ["-- ./agent.sh {question}", "--tasks", "t"], {})
    assert done.agent.entrypoint == "-- ./agent.sh {question}"


def test_variables_of_agents_and_of_other_commands_are_no_settings() -> None:
    ours = {"AGENTRL_MODEL": "theirs", "AGENTRL_GATEWAY": "http://x", "AGENTRL_TASK": "{}"}
    done = train(**ours, AGENTRL_GATEWAY__OPERATOR_KEY="x", UNRELATED__RANK="3")
    assert done == train()


@pytest.mark.parametrize("suffix", ["toml", "yaml"])
def test_flags_win_over_the_environment_and_that_over_the_file(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"c.{suffix}"
    yaml = "learning:\n  rank: 2\n  alpha: 0.3E+1\n"
    file.write_text(yaml if suffix == "yaml" else "[learning]\nrank = 2\nalpha = 3\n")
    base = ("--config", str(file))
    assert train(*base).learning.rank == 2
    assert train(*base, AGENTRL_LEARNING__RANK="4").learning.rank == 4
    done = train(*base, "--rank", "5", AGENTRL_LEARNING__RANK="4")
    assert (done.learning.rank, done.learning.alpha) == (5, 3)
    assert done == train("--rank=5", "--learning.alpha", "3")


def test_numbers_of_yaml_are_those_of_toml(tmp_path: Path) -> None:
    """To YAML 1.1, 1e-6 is text, which the prices of a model may not be."""
    file = tmp_path / "c.yml"
    params = "{input_cost_per_token: 1e-6, top_k: 6E1, seed: 1e, top_p: .5e+0, user: 1e-4-lr}"
    file.write_text(f"models: {{judge: {{model: openai/x, params: {params}}}}}\n")
    assert train("--config", str(file)).models["judge"].params == {
        "input_cost_per_token": 1e-6, "top_k": 60.0, "seed": "1e", "top_p": 0.5,
        "user": "1e-4-lr",
    }  # fmt: skip


@pytest.mark.parametrize("flag", ["--timeout", "--learning-rate", "--evaluation.success-reward"])
def test_infinite_numbers_are_refused(flag: str) -> None:
    """config.json could not keep them for --resume."""
    with pytest.raises(ConfigError, match=f"{flag.strip('-').replace('-', '_')}: "):
        train(flag, "inf")


@pytest.mark.parametrize("flags", ["tensorboard,wandb", '["tensorboard", "wandb"]', "twice"])
def test_lists_and_tables_are_json_or_names(flags: str, tmp_path: Path) -> None:
    expected = ["tensorboard", "wandb"]
    given = expected if flags == "twice" else [flags]
    assert train(*(f"--run.trackers={one}" for one in given)).run.trackers == expected
    assert train(AGENTRL_RUN__TRACKERS=",".join(given)).run.trackers == expected
    table = {"model": "openai/x", "fallbacks": [], "params": {"stop": ["x"]}}
    done = train(
        AGENTRL_MODELS__JUDGE__MODEL="openai/x", AGENTRL_MODELS__JUDGE__PARAMS='{"stop": ["x"]}'
    )
    (tmp_path / "c.toml").write_text('[models.other]\nmodel = "openai/y"')
    base = ("--config", str(tmp_path / "c.toml"))
    assert list(train(*base).models) == ["other"]
    assert done == train(*base, "--models", json.dumps({"judge": table}))


def test_switches_and_values_that_look_like_flags() -> None:
    assert train("--model.load-in-4bit").model.load_in_4bit
    assert not train("--no-model.load-in-4bit", AGENTRL_MODEL__LOAD_IN_4BIT="1").model.load_in_4bit
    assert train("--rollouts.on-error", "-1").rollouts.on_error == -1
    flags = ("--sampler", "vllm", "--sampler.vllm.args", "--enforce-eager")
    assert train(*flags).sampler.vllm.args == "--enforce-eager"
    done = train("--runners", "ray:16")
    assert (done.rollouts.runners, done.rollouts.runners_on) == (16, "ray")


def test_the_page_of_settings_is_written_from_the_models() -> None:
    page = runpy.run_path(str(ROOT / "scripts" / "settings_page.py"))["page"]()
    assert (ROOT / "docs" / "settings.md").read_text() == page, "python scripts/settings_page.py"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [("", 0), ("--samples 4", 1), ("--samples 4 --temperature 0.5", 0.5),
     ("--samples 4 --temperature 0", 0)],
)  # fmt: skip
def test_several_samples_are_sampled_unless_told_otherwise(flags: str, expected: float) -> None:
    how = load(EvalConfig, ["a:b", "--tasks", "t", *flags.split()], {}).evaluation
    assert how.temperature == expected
    assert bool(greedy_note(how.samples, expected)) == flags.endswith(" 0")
    dotted = flags.replace("--", "--evaluation.").split()
    done = train("--eval-tasks", "e", "--temperature", "0.7", *dotted)
    assert done.evaluation.temperature == (0.7 if flags == "--samples 4" else expected)


def test_a_run_has_the_steps_of_one_epoch_by_default() -> None:
    assert steps_of(config(batch_size=4), [{}] * 10) == 3


def test_every_epoch_visits_every_task_once() -> None:
    seen = tasks_in_order(0, 20, 10, seed=3)
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))
    assert seen[:10] != seen[10:]
    assert tasks_in_order(4, 4, 10, seed=3) == seen[4:8]
    assert tasks_in_order(4, 4, 10, seed=4) != seen[4:8]


def test_adapters_are_names_or_a_table() -> None:
    assert config(adapter="player").sole_adapter == "player"
    for written in (["asker", "answerer"], "asker,answerer", "asker, answerer"):
        given = config(adapters=written)
        assert list(given.trained) == ["asker", "answerer"]
        assert given.sole_adapter is None
        assert given.trained["asker"].agents is None
    table = {"asker": {"agents": ["Asker"], "rewards": ["question"]}, "answerer": {}}
    given = config(adapters=json.dumps(table))
    assert given.trained["asker"].rewards == ["question"]
    assert given.adapter_of_agent == {"Asker": "asker"}
    assert TrainConfig(**given.model_dump(mode="json")) == given  # as a resumed run reads it


@pytest.mark.parametrize(
    ("adapters", "message"),
    [
        (["asker", "asker"], "adapters: got ['asker', 'asker'], but a name is there twice"),
        (["a b"], "adapters.a b: a name has 1 to 100"),
        ([".."], "adapters...: a name has 1 to 100"),
        (["agentrl-tiny"], "adapters.agentrl-tiny: this is the base model's name"),
        ({"x": {"agents": []}}, "adapters.x.agents"),
        ({"x": {"role": "y"}}, "adapters.x.role: there is no such setting"),
        ({"x": {"agents": ["A"]}, "y": {"agents": ["A"]}}, "adapters.y.agents: 'A' trains x"),
        ("{", "not valid JSON"),
        (["judge"], "models.judge: this name is the trained model's"),
    ],
)
def test_mistakes_in_the_adapters_table(adapters: Any, message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        config(adapters=adapters, models=json.dumps({"judge": {"model": "openai/x"}}))
    assert message in explain(caught.value, TrainConfig)
