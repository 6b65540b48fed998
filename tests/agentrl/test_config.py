from __future__ import annotations

import json
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from command_line import agentrl
from pydantic import ValidationError
from settings import nested

from agentrl.config.checks import greedy_note
from agentrl.config.commands import COMMANDS, EvalConfig, TrainConfig
from agentrl.config.errors import ConfigError, explain
from agentrl.config.loading import load, parse_flags
from agentrl.config.renamed_settings import RENAMED
from agentrl.config.setting_names import settings_of
from agentrl.config.settings import OtherModelSettings
from agentrl.config.tasks import load_tasks, steps_of
from agentrl.gateway.handle import secret_variables
from agentrl.gateway.process import GatewayPlan, provider_model
from agentrl.runner import RunnerConfig
from agentrl.runner.agent_process.environment import attempt_environment, runner_environment
from agentrl.runs.folder import RunFolder
from agentrl.training.rollout_queue import tasks_in_order
from agentrl_tracer.schemas import Claim, Purpose
from agentrl_trainer.learner.schedules import default_learning_rate


def config(**settings: Any) -> TrainConfig:
    return TrainConfig(**nested(agent="a:b", tasks=Path("t"), **settings))


def train(*flags: str, **environment: str) -> TrainConfig:
    """The settings of ``agentrl train a:b --tasks t`` with more flags."""
    tokens = ["a:b", "--tasks", "t", *flags]
    return load(TrainConfig, parse_flags(TrainConfig, tokens), environment)


def test_help_is_one_screen_and_everything_is_behind_help_all() -> None:
    done = agentrl("train", "--help", COLUMNS="100")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) <= 40
    said = " ".join(done.stdout.split())
    parts = ("Training runs on this machine", "--backend tinker", "docs/client.md", "--help-all")
    for part in parts:
        assert part in said
    assert (Path(__file__).parents[2] / "docs" / "client.md").is_file()
    every = agentrl("train", "--help-all").stdout
    for setting in settings_of(TrainConfig):
        assert setting.flag in every
    assert "TINKER_API_KEY" in every


def test_windows_is_refused_with_a_sentence_that_names_wsl() -> None:
    code = "import sys; from agentrl.cli.main import main; sys.platform = 'win32'; main()"
    command = [sys.executable, "-c", code, "runs", "list"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "WSL" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "nowhere.py:f", "--tasks", "t"], "nowhere.py"),
        (["train", "json:loads", "--tasks", "no.jsonl"], "tasks: cannot read 'no.jsonl'"),
        (["train", "json:loads"], "agent.tasks: is missing"),
        (["train", "--tasks", "t"], "agent.entrypoint: is missing"),
        (["train", "json:loads", "--tasks", "t", "--config", "x.ini"], ".toml, .yaml or .yml"),
        (["train", "json:loads", "--resume", "nowhere"], "is no run folder"),
        (["serve", "--host", "0.0.0.0"], "operator key"),
        (["frobnicate"], "frobnicate"),
    ],
)
def test_mistakes_are_explained(arguments: list[str], message: str) -> None:
    done = agentrl(*arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--loss pppo --runners 0", "algorithm.loss: got 'pppo', but input should be"),
        ("--loss pppo --runners 0", "rollouts.runners: got '0', but input should be greater"),
        ("--group-siz 3", "--group-siz: there is no such flag. Did you mean --group-size?"),
        ("--eval-every 3", "--eval-every: is now --evaluation.every"),
        ("--kl-coef 3", "--kl-coef: is now --algorithm.kl.coef"),
        ("--runners", "expected one argument"),
        ("other:agent", "one argument too many"),
    ],
)
def test_wrong_flags_name_the_right_ones(flags: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        train(*flags.split())
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("variable", "message"),
    [
        ("AGENTRL_GROUP_SIZE", "AGENTRL_GROUP_SIZE: is now AGENTRL_ROLLOUTS__GROUP_SIZE"),
        ("AGENTRL_ROLLOUTS__GROUP_SIZ", "Did you mean rollouts.group_size?"),
        ("AGENTRL_ROLLOUTS__GROUP_SIZE", "rollouts.group_size: got '-1'"),
        ("AGENTRL_TRACKERS__X", "there is no such setting"),
        ("AGENTRL_RUN__TRACKERS", "not valid JSON"),
    ],
)
def test_wrong_variables_name_the_right_ones(variable: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        train(**{variable: "-1" if "TRACKERS" not in variable else "{"})
    assert message in str(caught.value)


def test_variables_of_agents_and_of_other_commands_are_no_settings() -> None:
    ours = {"AGENTRL_MODEL": "theirs", "AGENTRL_GATEWAY": "http://x", "AGENTRL_TASK": "{}"}
    done = train(**ours, AGENTRL_GATEWAY__OPERATOR_KEY="x", AGENTRL_RUN__TRACKERS='["wandb"]')
    assert done.model.name == "agentrl-tiny"
    assert done.run.trackers == ["wandb"]


@pytest.mark.parametrize("suffix", ["toml", "yaml"])
def test_flags_win_over_the_environment_and_that_over_the_file(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"c.{suffix}"
    table = (
        "learning:\n  rank: 2\n  alpha: 3\n"
        if suffix == "yaml"
        else "[learning]\nrank = 2\nalpha = 3\n"
    )
    file.write_text(table)
    base = ("--config", str(file))
    assert train(*base).learning.rank == 2
    assert train(*base, AGENTRL_LEARNING__RANK="4").learning.rank == 4
    done = train(*base, "--rank", "5", AGENTRL_LEARNING__RANK="4")
    assert (done.learning.rank, done.learning.alpha) == (5, 3)
    assert done == train("--rank=5", "--learning.alpha", "3")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[learning]\nlearning_rat = 1.0", "Did you mean learning.learning_rate?"),
        ("[learning]\ngroup_size = 1", "Did you mean rollouts.group_size?"),
        ("group_size = 1", "group_size: is now rollouts.group_size"),
        ('model = "x"', "model: is a table now; write model.name"),
        ("[rollout]\nrunners = 1", "rollout: there is no such setting. Did you mean rollouts?"),
        ("[learning", "cannot read"),
    ],
)
def test_wrong_keys_of_a_file_name_the_right_ones(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "c.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        train("--config", str(file))
    assert message in str(caught.value)


def test_every_old_name_leads_to_settings_that_exist() -> None:
    known = {setting.name for command in COMMANDS.values() for setting in settings_of(command)}
    for old, places in RENAMED.items():
        assert {*places} <= known, old


def test_the_page_of_settings_is_written_from_the_models() -> None:
    root = Path(__file__).parents[2]
    page = runpy.run_path(str(root / "scripts" / "settings_page.py"))["page"]()
    assert (root / "docs" / "settings.md").read_text() == page, "python scripts/settings_page.py"


def test_groups_must_be_able_to_compare() -> None:
    with pytest.raises(ConfigError, match=r"rollouts\.group_size: 1 is too small"):
        train("--group-size", "1")
    train("--group-size", "1", "--estimator", "reinforce", "--rollouts.min-group", "1")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stop_at": 0.9}, "evaluation.stop_at: has no effect without evaluation.tasks"),
        ({"steps": 10, "warmup_steps": 100}, "warmup_steps: 100 leave none of 10 steps"),
        ({"steps": 10, "warmup_steps": 10}, "give at most 9"),
    ],
)
def test_settings_without_effect_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        config(**settings)
    config(eval_tasks=Path("e"), stop_at=0.9)
    config(steps=10, warmup_steps=9)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", 0.0),
        ("--samples 4", 1.0),
        ("--samples 4 --temperature 0.5", 0.5),
        ("--samples 4 --temperature 0", 0.0),
    ],
)
def test_several_samples_are_sampled_unless_told_otherwise(flags: str, expected: float) -> None:
    tokens = ["a:b", "--tasks", "t", *flags.split()]
    how = load(EvalConfig, parse_flags(EvalConfig, tokens), {}).evaluation
    assert how.temperature == expected
    assert bool(greedy_note(how.samples, expected)) == flags.endswith(" 0")
    dotted = flags.replace("--", "--evaluation.").split()
    done = train("--eval-tasks", "e", "--temperature", "0.7", *dotted)
    assert done.evaluation.temperature == (0.7 if flags == "--samples 4" else expected)


def test_tasks_are_read_and_bad_lines_named(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text('{"n": 1}\n\n{"n": 2}\n')
    assert load_tasks(file, "tasks") == [{"n": 1}, {"n": 2}]
    file.write_text('{"n": 1}\n[2]\n')
    with pytest.raises(ConfigError, match=r"tasks: .*line 2 is a JSON list"):
        load_tasks(file, "tasks")
    file.write_text('{"n": 1\n')
    with pytest.raises(ConfigError, match="line 1 is not JSON"):
        load_tasks(file, "tasks")


def test_every_epoch_visits_every_task_once() -> None:
    given = config(batch_size=4)
    assert steps_of(given, [{}] * 10) == 3
    seen = tasks_in_order(0, 20, 10, seed=3)
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))
    assert seen[:10] != seen[10:]
    assert tasks_in_order(4, 4, 10, seed=3) == seen[4:8]
    assert tasks_in_order(4, 4, 10, seed=4) != seen[4:8]


def test_learning_rate_falls_with_size() -> None:
    assert default_learning_rate(850_000) == pytest.approx(1.5e-3)
    assert default_learning_rate(4_000_000_000) == pytest.approx(4e-5)
    assert 4e-5 < default_learning_rate(600_000_000) < 1.5e-3


def test_torn_metrics_are_passed_over(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.append_metrics({"step": 1, "x": 1})
    folder.append_metrics({"step": 2, "x": 2})
    with folder.metrics.open("a") as file:
        file.write('{"step": 3, "x"')
    assert [row["step"] for row in folder.read_metrics()] == [1, 2]
    folder.keep_metrics(lambda row: row["step"] <= 1)
    assert json.loads(folder.metrics.read_text()) == {"step": 1, "x": 1}


def test_a_taken_name_is_refused(tmp_path: Path) -> None:
    RunFolder.create(tmp_path, "a", "train").config.write_text("{}")
    with pytest.raises(ConfigError, match=r"name: .*exists already"):
        RunFolder.create(tmp_path, "a", "train")


TABLE = """
[models.answerer]
model = "openai/gpt-4o-mini"
api_base = "http://127.0.0.1:9/v1"
api_key_env = "ANSWERER_KEY"
fallbacks = ["spare.v2"]
params = {temperature = 0, drop_params = true, stop = ["x"]}
[models."spare.v2"]
model = "openai/x"
timeout = 3
"""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("", ""), "models.answerer.api_key_env: the environment variable ANSWERER_KEY is not set"),
        (("ANSWERER_KEY", "sk-secret-key"), "models.answerer.api_key_env: "),
        (("{temperature = 0", '{api_key = "sk-secret-key"'), "name its variable in api_key_env"),
        (("{temperature = 0", "{timeout = 0"), "timeout belongs beside params"),
        (
            ("{temperature = 0", '{extra_headers = {Authorization = "Bearer sk-secret-key"}'),
            "extra_headers.Authorization is a secret, which must not be in the file: write "
            "os.environ/NAME in its place",
        ),
        (
            ("{temperature = 0", '{extra_headers = {x-team-key = "sk-secret-key"}'),
            "extra_headers.x-team-key is a secret",
        ),
        (
            ("{temperature = 0", '{aws_secret_access_key = "sk-secret-key"'),
            "aws_secret_access_key is a secret",
        ),
        (
            ("{temperature = 0", '{extra_headers = {x-key = "os.environ/NO_SUCH_NAME"}'),
            "models.answerer.params: the environment variable NO_SUCH_NAME is not set",
        ),
        (("timeout = 3", "timeout = -3"), "models.spare.v2.timeout: got -3"),
        (("timeout = 3", "time_out = 3"), "models.spare.v2.time_out: there is no such setting"),
        (('"openai/x"', '""'), "models.spare.v2.model: got ''"),
    ],
)
def test_mistakes_in_the_models_table(
    tmp_path: Path, monkeypatch: Any, change: tuple[str, str], message: str
) -> None:
    monkeypatch.delenv("ANSWERER_KEY", raising=False)
    settings = tomllib.loads(TABLE.replace(*change))
    with pytest.raises(ValidationError) as caught:
        config(**settings)
    text = explain(caught.value, TrainConfig)
    assert message in text
    assert "sk-secret-key" not in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('["spare.v2"]', '["nobody"]'), "models.answerer.fallbacks: 'nobody' is no other model"),
        (("models.answerer", "models.policy"), "models.policy: this name is the trained model's"),
    ],
)
def test_models_must_fit_together(monkeypatch: Any, change: tuple[str, str], message: str) -> None:
    monkeypatch.setenv("ANSWERER_KEY", "sk-secret-key")
    with pytest.raises(ValidationError) as caught:
        config(**tomllib.loads(TABLE.replace(*change)))
    assert message in explain(caught.value, TrainConfig)


def test_the_models_table_reaches_the_gateway_without_its_keys(monkeypatch: Any) -> None:
    monkeypatch.setenv("ANSWERER_KEY", "sk-secret-key")
    given = config(**tomllib.loads(TABLE))
    dumped = given.model_dump(mode="json")
    assert "sk-secret-key" not in json.dumps(dumped)
    # A resumed run reads it back.
    assert TrainConfig(**dumped).models == given.models
    plan = GatewayPlan.of(given, vllm_url=None, store="")
    assert "sk-secret-key" not in plan.model_dump_json()
    again = GatewayPlan.model_validate_json(plan.model_dump_json())
    assert again.model_dump_json() == plan.model_dump_json()
    answerer, spare = (provider_model(one) for one in plan.models.values())
    assert (answerer.api_key, answerer.fallbacks) == ("sk-secret-key", ["spare.v2"])
    assert answerer.params == {"temperature": 0, "drop_params": True, "stop": ["x"]}
    assert "sk-secret-key" not in repr(answerer)
    assert (spare.api_key, spare.timeout) == (None, 3)
    # A server of one's own must not get the key that LiteLLM would look up for its provider.
    own = OtherModelSettings(model="openai/x", api_base="http://x")
    assert provider_model(own).api_key == "none"


def test_parameters_may_name_secrets(monkeypatch: Any) -> None:
    monkeypatch.setenv("ANSWERER_KEY", "sk-secret-key")
    monkeypatch.setenv("TEAM_TOKEN", "sk-team-token")
    params = (
        'params = {extra_headers = {Authorization = "Bearer os.environ/TEAM_TOKEN", x-a = "b"}, '
        'prompt_cache_key = "games", max_tokens = 5, stop = ["os.environ/TEAM_TOKEN"]}'
    )
    table = TABLE.replace('params = {temperature = 0, drop_params = true, stop = ["x"]}', params)
    given = config(**tomllib.loads(table))
    models = given.model_dump(mode="json")["models"]
    assert "sk-team-token" not in json.dumps(models)
    assert {"ANSWERER_KEY", "TEAM_TOKEN"} < {*secret_variables(models, None)}
    assert provider_model(given.models["answerer"]).params == {
        "extra_headers": {"Authorization": "Bearer sk-team-token", "x-a": "b"},
        "prompt_cache_key": "games",
        "max_tokens": 5,
        "stop": ["sk-team-token"],
    }


def test_a_file_and_a_flag_give_the_models_table(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("ANSWERER_KEY", "k")
    file = tmp_path / "c.toml"
    file.write_text(TABLE)
    done = train("--config", str(file))
    assert [one.model for one in done.models.values()] == ["openai/gpt-4o-mini", "openai/x"]
    assert done.models["answerer"].params["stop"] == ["x"]
    flag = train("--config", str(file), "--models", '{"other": {"model": "openai/y"}}')
    assert list(flag.models) == ["other"]
    monkeypatch.delenv("ANSWERER_KEY")
    for flags, message in (
        (("--config", str(file)), "ANSWERER_KEY is not set"),
        (("--models", "nonsense"), "models: got 'nonsense', but it is not valid JSON"),
    ):
        with pytest.raises(ConfigError) as caught:
            train(*flags)
        assert message in str(caught.value)


def test_agents_do_not_get_other_models_keys(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("ANSWERER_KEY", "sk-secret-key")
    config = RunnerConfig(
        store=str(tmp_path / "s.db"), gateway="http://127.0.0.1:9", run_id="r", agent="json:loads",
        model="policy", runners=1, timeout_s=9.0, lease_s=9.0, logs=str(tmp_path),
        withheld=("ANSWERER_KEY",),
    )  # fmt: skip
    assert RunnerConfig.from_json(config.to_json()) == config
    assert "ANSWERER_KEY" not in runner_environment(config)
    assert "PATH" in runner_environment(config)


def test_an_application_keeps_its_otlp_backend(tmp_path: Path) -> None:
    config = RunnerConfig(
        store="",
        gateway="http://g:1",
        run_id=None,
        agent="a:b",
        model="m",
        logs=str(tmp_path),
        runners=1,
        timeout_s=9.0,
        lease_s=9.0,
    )
    claim = Claim("r", "a", 1, "run", Purpose.TRAIN, 0, "t", {}, "key", 0.0)
    name = "OTEL_EXPORTER_OTLP_ENDPOINT"
    assert name not in attempt_environment(config, claim, {name: "http://jaeger:4318"})
    for before in ({}, {name: "http://g:1/rollouts/earlier"}):
        assert attempt_environment(config, claim, before)[name] == "http://g:1/rollouts/r"
