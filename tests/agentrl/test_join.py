"""What ``agentrl runner`` makes of a run that is under way elsewhere."""

from __future__ import annotations

from typing import Any

from agentrl.cli.runner import runner_config
from agentrl.config.commands import JoinConfig


def test_agents_are_told_no_key_that_is_not_theirs() -> None:
    models = {"judge": {"api_key_env": "JUDGE_KEY", "params": {}}}
    started = {"agent": "agents:one", "vllm_key_env": "VLLM_KEY", "models": models}
    run: dict[str, Any] = {"id": "r", "kind": "train", "config": started}
    settings = JoinConfig.model_validate(
        {"run": {"store": "postgresql://trainer/db"}, "gateway": {"url": "http://trainer:8000"}}
    )
    withheld = runner_config(settings, run).withheld
    assert {"TINKER_API_KEY", "VLLM_KEY", "JUDGE_KEY", "AGENTRL_FORWARD_OTLP_HEADERS"} <= set(
        withheld
    )
