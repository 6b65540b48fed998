"""What the runner processes need to know. Travels to them as JSON in the environment."""

from __future__ import annotations

from dataclasses import dataclass

SETTINGS = "AGENTRL_RUNNER_SETTINGS"


@dataclass(frozen=True, slots=True)
class RunnerConfig:
    store: str  # URL
    gateway: str  # URL, without a path
    run_id: str
    agent: str  # see runner.agent
    model: str  # the model name that the agent should ask for
    runners: int
    timeout_s: float
    lease_s: float
    logs: str  # folder; every attempt writes its output there
