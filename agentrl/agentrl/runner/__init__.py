"""Runners: processes that claim rollouts and run the agent.

Three levels: the *pool* (``pool.py``, a subprocess of the trainer) forks *workers* (``worker.py``),
which fork *agent processes* (``agent_process``): a fresh one for every attempt, unless settings let
attempts share one. Importing this package is light: no store, no OpenTelemetry.
"""

from agentrl.runner.agent_spec import validate_agent
from agentrl.runner.pool_client import start_pool
from agentrl.runner.protocol import RunnerConfig

__all__ = ["RunnerConfig", "start_pool", "validate_agent"]
