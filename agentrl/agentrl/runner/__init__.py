"""Runners: processes that claim rollouts and run the agent.

Three levels: the *pool* (``pool.py``, a subprocess of the trainer) forks *workers* (``worker.py``),
which fork one *attempt* (``agent_process``) at a time: a fresh process for every try of a rollout.
Importing this package is light: no store, no OpenTelemetry.
"""

from agentrl.runner.agent_spec import validate_agent
from agentrl.runner.pool_client import PoolHandle, start_pool
from agentrl.runner.protocol import RunnerConfig

__all__ = ["PoolHandle", "RunnerConfig", "start_pool", "validate_agent"]
