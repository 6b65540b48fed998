"""What a pool of runners has to be told, as one JSON line.

Knows the settings and the environment they must not meet. Light: the trainer imports it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class RunnerConfig:
    """
    Args:
        store: URL or path of the trace store.
        gateway: base URL of the gateway, without ``/v1``.
        run_id: only this run's rollouts are claimed; None: any.
        agent: ``module:function``, ``file.py:function`` or a command line.
        model: the model name that agents are told to ask for (``AGENTRL_MODEL``).
        runners: how many workers.
        timeout_s: hard limit of one attempt.
        lease_s: a runner silent for this long counts as lost.
        logs: folder of ``runners.log`` and one log per attempt.
        rollouts_per_process: how many attempts a process may run in turn; 1: a fresh one for each.
        concurrency: how many attempts of an async agent a process runs at a time.
        python: another interpreter (of another virtual environment) that runs the agent.
        python_path: folders put first on the agent's ``sys.path`` and ``PYTHONPATH``.
    """

    store: str
    gateway: str
    run_id: str | None
    agent: str
    model: str
    logs: str
    runners: int = 8
    timeout_s: float = 600.0
    lease_s: float = 15.0
    rollouts_per_process: int = 1
    concurrency: int = 1
    python: str | None = None
    python_path: tuple[str, ...] = ()
    withheld: tuple[str, ...] = ()  # variables that agents do not get: other models' keys

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RunnerConfig:
        fields = json.loads(text)
        tuples = {name: tuple(fields[name]) for name in ("python_path", "withheld")}
        return cls(**{**fields, **tuples})


def check_environment(env: Mapping[str, str] = os.environ) -> None:
    """
    Raises:
        RuntimeError: the environment would silence the agents' spans and rewards.
    """
    if env.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        raise RuntimeError(
            "OTEL_SDK_DISABLED=true is set: it would silently drop every reward and span of the "
            "agent. Unset it; to quiet CrewAI use CREWAI_DISABLE_TELEMETRY=true (set for agents)"
        )
