"""What ``agentrl runner`` makes of a run that is under way elsewhere."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from store_records import start_run

from agentrl.cli.runner import runner_command, runner_config
from agentrl.config.commands import JoinConfig
from agentrl.config.errors import ConfigError
from agentrl_tracer.schemas import Policies
from agentrl_tracer.store import Store

SETTINGS = JoinConfig.model_validate(
    {
        "run": {"store": "postgresql://trainer/db"},
        "gateway": {"url": "http://trainer:8000"},
        "rollouts": {"timeout": 7},
    }
)


def run(**config: Any) -> dict[str, Any]:
    return {"id": "r", "kind": "train", "config": config}


def test_agents_are_told_no_key_that_is_not_theirs() -> None:
    started = run(
        agent={"entrypoint": "agents:one"},
        sampler={"vllm": {"key_env": "VLLM_KEY"}},
        models={"judge": {"api_key_env": "JUDGE_KEY", "params": {}}},
        model={"name": "agentrl-tiny", "adapter": "policy"},
        adapters={"player": {}},
        rollouts={"lease": 3, "timeout": 4},
    )
    joined = runner_config(SETTINGS, started)
    keys = {"TINKER_API_KEY", "VLLM_KEY", "JUDGE_KEY", "AGENTRL_FORWARD_OTLP_HEADERS"}
    assert keys <= set(joined.withheld)
    assert (joined.agent, joined.model) == ("agents:one", "player")
    assert (joined.lease_s, joined.timeout_s, joined.concurrency) == (3, 7, 1)


def test_runners_spread_over_the_runs_gateways() -> None:
    urls = ["http://trainer:8000", "http://trainer:8001"]
    started = run(agent={"entrypoint": "a:b"}, model={"name": "m", "adapter": "p"})
    started["config"]["gateway"] = {"urls": urls}
    joined = runner_config(JoinConfig.model_validate({"run": {"store": "s.db"}}), started)
    assert joined.gateways == urls
    assert sorted(joined.of_worker(index).gateway for index in (3, 4)) == urls
    assert runner_config(SETTINGS, started).gateways == ["http://trainer:8000"]


def test_a_run_of_an_earlier_version_is_refused() -> None:
    with pytest.raises(ConfigError, match="an earlier version started the run r"):
        runner_config(SETTINGS, run(agent="agents:one", vllm_key_env="VLLM_KEY"))


@pytest.mark.parametrize("state", ["failed", "interrupted", "finished"])
def test_what_starts_it_again_has_it_join_a_run_that_goes_on(
    tmp_path: Path, state: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "store.db"
    with contextlib.closing(Store(str(path))) as store:
        run_id = start_run(store)
        config = {"agent": {"entrypoint": "-- true"}, "model": {"name": "m", "adapter": "p"}}
        store.resume_run(run_id, config, Policies())
        store.end_run(run_id, state)
    given = ["--store", str(path), "--gateway", "http://127.0.0.1:1", "--logs", str(tmp_path)]
    with contextlib.nullcontext() if state == "finished" else pytest.raises(SystemExit, match="1"):
        runner_command(*given, "--run", run_id)
    assert f"is {state}: there are no more" in capsys.readouterr().out
