"""Settings of other models name their secrets, which reach the gateway and no agent."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from settings import nested

from agentrl.config.commands import TrainConfig
from agentrl.config.errors import explain
from agentrl.config.secrets import (
    as_recorded,
    secret_variables,
    store_url,
    without_password,
)
from agentrl.config.settings.models import OtherModelSettings
from agentrl.gateway.process import GatewayPlan, provider_model
from agentrl.process_privacy import environment_without
from agentrl.runner.agent_process.environment import attempt_environment
from agentrl.runner.protocol import RunnerConfig
from agentrl_tracer.schemas import Claim, Purpose

PARAMS = 'params = {temperature = 0, drop_params = true, stop = ["x"]}'
TABLE = f"""
[models.answerer]
model = "openai/gpt-4o-mini"
api_base = "http://127.0.0.1:9/v1"
api_key_env = "ANSWERER_KEY"
fallbacks = ["spare.v2"]
{PARAMS}
[models."spare.v2"]
model = "openai/x"
timeout = 3
"""


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANSWERER_KEY", "sk-secret-key")


def config(before: str = "", after: str = "") -> TrainConfig:
    """Settings with ``TABLE``, in which one text is replaced by another."""
    table = tomllib.loads(TABLE.replace(before, after))
    return TrainConfig(**nested(agent="a:b", tasks=Path("t"), **table))


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("ANSWERER_KEY", "NOT_SET", "answerer.api_key_env: the environment variable NOT_SET is not "
         "set"),
        ("ANSWERER_KEY", "sk-secret-key", "models.answerer.api_key_env: "),
        ("temperature = 0", 'api_key = "sk-secret-key"', "name its variable in api_key_env"),
        ("temperature = 0", "timeout = 0", "timeout belongs beside params"),
        ("temperature = 0", 'extra_headers = {Authorization = "Bearer sk-secret-key"}',
         "extra_headers.Authorization is a secret, which must not be in the file: write "
         "os.environ/NAME in its place"),
        ("temperature = 0", 'extra_headers = {x-team-key = "sk-secret-key"}',
         "extra_headers.x-team-key is a secret"),
        ("temperature = 0", 'aws_secret_access_key = "sk-secret-key"',
         "aws_secret_access_key is a secret"),
        ("temperature = 0", 'extra_headers = {x-key = "os.environ/NO_SUCH_NAME"}',
         "models.answerer.params: the environment variable NO_SUCH_NAME is not set"),
        ("timeout = 3", "timeout = -3", "models.spare.v2.timeout: got -3"),
        ("timeout = 3", "time_out = 3", "models.spare.v2.time_out: there is no such setting"),
        ('"openai/x"', '""', "models.spare.v2.model: got ''"),
        ('["spare.v2"]', '["other"]', "models.answerer.fallbacks: 'other' is no other model"),
        ("models.answerer", "models.policy", "models.policy: this name is the trained model's"),
    ],
)  # fmt: skip
def test_mistakes_in_the_models_table(before: str, after: str, message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        config(before, after)
    text = explain(caught.value, TrainConfig)
    assert message in text
    assert "sk-secret-key" not in text


def test_the_models_table_reaches_the_gateway_without_its_keys() -> None:
    given = config()
    dumped = given.model_dump(mode="json")
    assert "sk-secret-key" not in json.dumps(dumped)
    assert TrainConfig(**dumped).models == given.models  # a resumed run reads it back
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


def test_parameters_may_name_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEAM_TOKEN", "sk-team-token")
    given = config(
        PARAMS,
        'params = {extra_headers = {Authorization = "Bearer os.environ/TEAM_TOKEN", x-a = "b"}, '
        'prompt_cache_key = "games", max_tokens = 5, stop = ["os.environ/TEAM_TOKEN"]}',
    )
    models = given.model_dump(mode="json")["models"]
    assert "sk-team-token" not in json.dumps(models)
    assert {"ANSWERER_KEY", "TEAM_TOKEN"} < {*secret_variables({"models": models})}
    assert provider_model(given.models["answerer"]).params == {
        "extra_headers": {"Authorization": "Bearer sk-team-token", "x-a": "b"},
        "prompt_cache_key": "games",
        "max_tokens": 5,
        "stop": ["sk-team-token"],
    }


@pytest.fixture
def runner(tmp_path: Path) -> RunnerConfig:
    return RunnerConfig(
        store=str(tmp_path / "s.db"), gateways=["http://g:1"], run_id="r", agent="json:loads",
        model="policy", runners=1, timeout_s=9.0, lease_s=9.0, logs=str(tmp_path),
        withheld=["ANSWERER_KEY"],
    )  # fmt: skip


def test_agents_do_not_get_other_models_keys(runner: RunnerConfig) -> None:
    assert RunnerConfig.from_json(runner.to_json()) == runner
    inherited = environment_without(runner.withheld)
    assert "ANSWERER_KEY" not in inherited
    assert "PATH" in inherited


def test_an_application_keeps_its_otlp_backend(runner: RunnerConfig) -> None:
    claim = Claim("r", "a", 1, "run", Purpose.TRAIN, 0, "t", {}, "sk-agentrl-key", 0.0)
    endpoint, headers = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_HEADERS"
    for theirs in (
        {endpoint: "http://jaeger:4318"},
        {headers: "x-honeycomb-team=TEAM"},
        {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "https://api.honeycomb.io/v1/traces"},
    ):
        assert not {endpoint, headers} & {*attempt_environment(runner, claim, theirs)}
    earlier = {
        endpoint: "http://g:1/rollouts/earlier",
        headers: "authorization=Bearer%20sk-agentrl-earlier",
    }
    for before in ({}, earlier):
        env = attempt_environment(runner, claim, before)
        assert env[endpoint] == "http://g:1/rollouts/r"
        assert env[headers] == "authorization=Bearer%20sk-agentrl-key"


STORE = "postgresql://me:{}@host:5432/agentrl?sslmode=require"
REFERENCE = STORE.format("os.environ/AGENTRL_STORE_PASSWORD")


def _with(setting: str, value: str, **more: str) -> dict[str, Any]:
    needed = {"agent.entrypoint": "a:b", "agent.tasks": "tasks.jsonl"}
    return nested(**{**needed, setting: value, **more})


def test_agents_do_not_get_the_keys_of_trackers() -> None:
    keys = {*secret_variables({"run": {"trackers": ["wandb", "mlflow", "tensorboard"]}})}
    assert {"WANDB_API_KEY", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN"} <= keys
    assert not any(name.startswith("MLFLOW") for name in secret_variables({"run": {}}))


def test_the_stores_password_is_recorded_as_a_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    given = TrainConfig.model_validate(_with("run.store", STORE.format("p%40ss")))
    written = as_recorded(given.model_dump(mode="json"))
    assert written["run"]["store"] == REFERENCE
    assert "p%40ss" not in json.dumps(written)
    assert as_recorded(written) == written
    with pytest.raises(ValidationError) as missing:
        TrainConfig.model_validate(_with("run.store", REFERENCE))
    assert "run.store: the environment variable AGENTRL_STORE_PASSWORD is not set" in explain(
        missing.value, TrainConfig
    ).replace("got '" + REFERENCE + "', but ", "")
    monkeypatch.setenv("AGENTRL_STORE_PASSWORD", "p@ss")
    assert store_url(REFERENCE) == STORE.format("p%40ss")
    monkeypatch.setenv("DATABASE_URL", STORE.format("other"))
    assert store_url("os.environ/DATABASE_URL") == STORE.format("other")
    own = TrainConfig.model_validate(_with("run.store", "os.environ/DATABASE_URL"))
    assert {"DATABASE_URL", "PGPASSWORD", "AGENTRL_RUN__STORE"} <= {*secret_variables(own)}
    for plain in ("runs/x.db", "postgresql://me@host/db", "postgresql:///db?host=/run"):
        assert without_password(plain) == store_url(plain) == plain
    assert without_password("postgresql://h/d?user=u&password=x") == (
        "postgresql://h/d?user=u&password=os.environ/AGENTRL_STORE_PASSWORD"
    )


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("gateway.forward_otlp", "http://me:hunter2@host:4318"),
        ("gateway.forward_otlp", "https://hunter2@host"),
        ("gateway.forward_otlp", "https://host/v1?api_key=hunter2"),
        ("tinker.base_url", "http://me:hunter2@host"),
        ("sampler.vllm.url", "http://me:hunter2@host"),
        ("sampler.vllm.args", "--api-key hunter2"),
    ],
)
def test_a_secret_in_a_url_is_refused_and_not_repeated(setting: str, value: str) -> None:
    more = {"sampler.kind": "vllm"} if "vllm" in setting else {}
    with pytest.raises(ValidationError) as refused:
        TrainConfig.model_validate(_with(setting, value, **more))
    said = explain(refused.value, TrainConfig)
    assert setting in said
    assert "must not be in" in said
    assert "hunter2" not in said
