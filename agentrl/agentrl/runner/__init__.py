"""Runners: processes that claim rollouts and run the agent.

Three levels: the *pool* (``pool.py``, a subprocess of the trainer, which ``pool_client`` starts)
forks *workers* (``worker.py``), which fork *agent processes* (``agent_process``): a fresh one for
every attempt, unless settings let attempts share one.
"""
