"""Runners: processes that claim rollouts and run the agent, and that nobody has to think about.

Three levels: the *pool* (``pool.py``, a subprocess of the trainer) forks *workers* (``worker.py``),
which fork one *attempt* (``attempt.py``) at a time: a fresh process for every try of a rollout.
Importing this package is light: no store, no OpenTelemetry.
"""

from agentrl.runner.agent import Agent, load_agent, validate_agent
from agentrl.runner.config import RunnerConfig
from agentrl.runner.pool_client import PoolHandle, start_pool

__all__ = ["Agent", "PoolHandle", "RunnerConfig", "load_agent", "start_pool", "validate_agent"]
