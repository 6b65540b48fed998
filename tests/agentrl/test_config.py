from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from agentrl.cli.main import app
from agentrl.config.settings import (
    ConfigError,
    EvalConfig,
    ServeConfig,
    TrainConfig,
    explain,
    greedy_note,
    tables_as_json,
)
from agentrl.config.tasks import load_tasks, steps_of
from agentrl.gateway.process import other_model, variables_of
from agentrl.runner import RunnerConfig
from agentrl.runner.agent_process.environment import attempt_environment, runner_environment
from agentrl.runs.folder import RunFolder
from agentrl.training.rollout_queue import tasks_in_order
from agentrl_tracer.schemas import Claim, Purpose
from agentrl_trainer.learner.schedules import default_learning_rate


def agentrl(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    import os

    return subprocess.run(
        [sys.executable, "-m", "agentrl", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **env, "COLUMNS": "200"},
        check=False,
    )


def test_a_wrong_value_names_field_value_and_choices() -> None:
    done = agentrl("train", "x:y", "--tasks", "t", "--loss", "pppo", "--runners", "0")
    assert done.returncode == 2
    for part in ("loss", "'pppo'", "'cispo'", "runners", "greater than or equal to 1"):
        assert part in done.stderr, done.stderr


def test_the_help_says_where_it_trains() -> None:
    done = agentrl("train", "--help")
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert "learns on this machine" in said
    assert "--backend tinker" in said
    assert "TINKER_API_KEY" in said
    assert (Path(__file__).parents[2] / "docs" / "client.md").is_file()
    assert "docs/client.md" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "nowhere.py:f", "--tasks", "t"], "nowhere.py"),
        (["train", "json:loads", "--tasks", "no.jsonl"], "tasks: cannot read 'no.jsonl'"),
        (["train", "json:loads"], "tasks: is missing"),
        (["train", "--tasks", "t"], "agent"),
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


@pytest.mark.parametrize("suffix", ["toml", "yaml"])
def test_file_environment_and_flags_agree(tmp_path: Path, suffix: str) -> None:
    """Flags win over the environment, that over the file: seen in which error is reported."""
    file = tmp_path / f"c.{suffix}"
    line = "{}: {}\n" if suffix == "yaml" else "{} = {}\n"
    file.write_text(line.format("rank", 0) + line.format("tasks", '"t"'))
    base = ("train", "json:loads", "--config", str(file))
    assert "rank: got '0'" in agentrl(*base).stderr
    assert "rank: got '-1'" in agentrl(*base, AGENTRL_RANK="-1").stderr
    assert "rank: got '-2'" in agentrl(*base, "--rank", "-2", AGENTRL_RANK="-1").stderr


def test_an_unknown_key_in_the_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('tasks = "t"\nlearning_rat = 1.0\n')
    done = agentrl("train", "json:loads", "--config", str(file))
    assert done.returncode == 2
    assert "learning" in done.stderr


def test_groups_must_be_able_to_compare() -> None:
    with pytest.raises(ValidationError) as caught:
        TrainConfig(agent="a:b", tasks=Path("t"), group_size=1)
    assert "group_size 1 is too small" in explain(caught.value, TrainConfig)
    TrainConfig(agent="a:b", tasks=Path("t"), group_size=1, estimator="reinforce", min_group=1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stop_at": 0.9}, "stop_at has no effect: it needs eval_tasks"),
        ({"steps": 10, "warmup_steps": 100}, "warmup_steps: 100 leave none of 10 steps"),
        ({"steps": 10, "warmup_steps": 10}, "give at most 9"),
    ],
)
def test_settings_without_effect_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        TrainConfig(agent="a:b", tasks=Path("t"), **settings)
    assert message in explain(caught.value, TrainConfig)
    TrainConfig(agent="a:b", tasks=Path("t"), eval_tasks=Path("e"), stop_at=0.9)
    TrainConfig(agent="a:b", tasks=Path("t"), steps=10, warmup_steps=9)


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
    """As the command line makes them: what is a default there, and what was given."""
    tokens = ["eval", "a:b", "--tasks", "t", *flags.split()]
    settings = app.parse_args(tokens)[1].arguments["settings"]
    config = EvalConfig(**settings.model_dump(), agent="a:b")
    assert config.temperature == expected
    assert bool(greedy_note(config.samples, expected)) == flags.endswith(" 0")

    tokens = ["train", "a:b", "--tasks", "t", "--eval-tasks", "e", "--temperature", "0.7"]
    tokens += flags.replace("--", "--eval-").split()
    settings = app.parse_args(tokens)[1].arguments["settings"]
    config = TrainConfig(**settings.model_dump(), agent="a:b")
    assert config.eval_temperature == (0.7 if flags == "--samples 4" else expected)


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
    config = TrainConfig(agent="a:b", tasks=Path("t"), batch_size=4)
    assert steps_of(config, [{}] * 10) == 3
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
        TrainConfig(agent="a:b", tasks=Path("t"), **settings)
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
        TrainConfig(agent="a:b", tasks=Path("t"), **tomllib.loads(TABLE.replace(*change)))
    assert message in explain(caught.value, TrainConfig)


def test_the_models_table_reaches_the_gateway_without_its_keys(monkeypatch: Any) -> None:
    monkeypatch.setenv("ANSWERER_KEY", "sk-secret-key")
    config = TrainConfig(agent="a:b", tasks=Path("t"), **tomllib.loads(TABLE))
    dumped = config.model_dump(mode="json")
    assert "sk-secret-key" not in json.dumps(dumped)
    # A resumed run reads it back.
    assert TrainConfig(**{**dumped, **tables_as_json(dumped)}).models == config.models
    answerer, spare = (other_model(fields) for fields in dumped["models"].values())
    assert (answerer.api_key, answerer.fallbacks) == ("sk-secret-key", ["spare.v2"])
    assert answerer.params == {"temperature": 0, "drop_params": True, "stop": ["x"]}
    assert "sk-secret-key" not in repr(answerer)
    assert (spare.api_key, spare.timeout) == (None, 3)
    # A server of one's own must not get the key that LiteLLM would look up for its provider.
    assert other_model({**dumped["models"]["spare.v2"], "api_base": "http://x"}).api_key == "none"


def test_parameters_may_name_secrets(monkeypatch: Any) -> None:
    monkeypatch.setenv("ANSWERER_KEY", "sk-secret-key")
    monkeypatch.setenv("TEAM_TOKEN", "sk-team-token")
    params = (
        'params = {extra_headers = {Authorization = "Bearer os.environ/TEAM_TOKEN", x-a = "b"}, '
        'prompt_cache_key = "games", max_tokens = 5, stop = ["os.environ/TEAM_TOKEN"]}'
    )
    table = TABLE.replace('params = {temperature = 0, drop_params = true, stop = ["x"]}', params)
    config = TrainConfig(agent="a:b", tasks=Path("t"), **tomllib.loads(table))
    models = config.model_dump(mode="json")["models"]
    assert "sk-team-token" not in json.dumps(models)
    assert variables_of(models) == ["ANSWERER_KEY", "TEAM_TOKEN", "TEAM_TOKEN"]
    assert other_model(models["answerer"]).params == {
        "extra_headers": {"Authorization": "Bearer sk-team-token", "x-a": "b"},
        "prompt_cache_key": "games",
        "max_tokens": 5,
        "stop": ["sk-team-token"],
    }


def test_the_command_line_reads_the_models_table(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('tasks = "no.jsonl"\n' + TABLE)
    done = agentrl("train", "json:loads", "--config", str(file), ANSWERER_KEY="k")
    assert "cannot read 'no.jsonl'" in done.stderr  # it came past the table
    assert "ANSWERER_KEY is not set" in agentrl("train", "json:loads", "--config", str(file)).stderr
    flag = agentrl("train", "json:loads", "--tasks", "t", "--models", "nonsense")
    assert "models: got 'nonsense', but it is not valid JSON" in flag.stderr


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


def test_every_limit_reaches_the_gateway() -> None:
    """Each of the limits is a setting of its own, and the gateway knows it by the same name."""
    from agentrl.gateway.process import GatewaySettings

    asked = ServeConfig(
        max_concurrent=2, max_queued=3, receive_timeout=4, receive_mib=40, stall_timeout=5,
        grace=6, accept_any_model=False,
    )  # fmt: skip
    limits = asked.gateway_limits()
    assert list(limits.values()) == [2, 3, 4, 40, 5, 6, False, None]
    assert limits.keys() <= set(GatewaySettings.__dataclass_fields__)
