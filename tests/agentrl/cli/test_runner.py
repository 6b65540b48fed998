"""What ``agentrl runner`` makes of a run that is under way elsewhere."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.cli.runner import runner_config
from agentrl.config.commands import JoinConfig
from agentrl.config.errors import ConfigError

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
