"""Runners: the processes that execute the agent.

Three levels. The *pool* imports the agent's frameworks once and forks *runners*; a runner claims
rollouts and forks a fresh *attempt* for each. Frameworks are therefore imported once and shared, and
yet no rollout can leave anything behind for the next one.
"""

from agentrl.runner.agent import validate_agent
from agentrl.runner.config import RunnerConfig
from agentrl.runner.pool import start_pool

__all__ = ["RunnerConfig", "start_pool", "validate_agent"]
